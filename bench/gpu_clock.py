"""Clocks of the GPU benchmark: device events with a cold L2, and what the device can do."""

import subprocess
import time

import torch

FLUSH_BYTES = 256 << 20
COPY_BYTES = 1 << 30
WARM_SECONDS = 0.05


class CudaClock:
    """Device events around a call as a user makes it. Before each call 256 MB are written, which
    leaves nothing of the inputs in the L2; meanwhile the host queues the events and the call, so
    that its own time counts only where it is longer than that."""

    def __init__(self, device):
        self.device = device
        self.trash = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=device)

    def warm_up(self, call):
        end = time.perf_counter() + WARM_SECONDS
        call()
        torch.cuda.synchronize(self.device)
        while time.perf_counter() < end:
            call()
            torch.cuda.synchronize(self.device)

    def samples_ms(self, call, count):
        pairs = []
        for _ in range(count):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            self.trash.zero_()
            begin.record()
            call()
            end.record()
            pairs.append((begin, end))
        torch.cuda.synchronize(self.device)
        return [begin.elapsed_time(end) for begin, end in pairs]

    def copy_gb_per_s(self):
        """Bytes read plus bytes written of the fastest of some copies."""
        source, target = (
            torch.empty(COPY_BYTES, dtype=torch.uint8, device=self.device) for _ in range(2)
        )
        source.zero_()
        self.warm_up(lambda: target.copy_(source))
        fastest = min(self.samples_ms(lambda: target.copy_(source), 20))
        return 2e-6 * COPY_BYTES / fastest

    def launch(self):
        """An empty kernel through PyTorch: what a launch costs the host here."""
        torch.cuda._sleep(0)

    def wait(self):
        torch.cuda.synchronize(self.device)

    def describe(self):
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        try:
            done = subprocess.run(query, capture_output=True, text=True, timeout=30)
            driver = done.stdout.split("\n")[0].strip() or "unknown"
        except (OSError, subprocess.TimeoutExpired):
            driver = "unknown"
        return {"gpu": torch.cuda.get_device_name(self.device), "driver": driver}


class HostClock:
    """Stands for CudaClock in a dry run on CPU tensors."""

    def warm_up(self, call):
        call()

    def samples_ms(self, call, count):
        samples = []
        for _ in range(count):
            begin = time.perf_counter()
            call()
            samples.append(1e3 * (time.perf_counter() - begin))
        return samples

    def copy_gb_per_s(self):
        source, target = (torch.zeros(1 << 24, dtype=torch.uint8) for _ in range(2))
        return 2e-6 * source.numel() / min(self.samples_ms(lambda: target.copy_(source), 5))

    def launch(self):
        pass

    def wait(self):
        pass

    def describe(self):
        return {"gpu": "none (dry run)", "driver": None, "dry_run": True}
