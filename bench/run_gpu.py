"""The GPU benchmark: every case in three gate regimes, cold L2, device events; the error against
float64 and the kernel that ran beside every time; peers that happen to be installed in the same
run. Records are written as they come."""

import itertools
import json
import os
import sys
import time
from pathlib import Path

import records
from gpu_names import NAMES

DATA = records.ROOT / "data" / "kda_trained_slice.safetensors"
HOST_CASES = ("16x1", "1024x4")  # one kernel; on path sm90 cut into segments, three of them
SLOW_MS = 5  # calls that take longer get fewer samples


def add_options(parser):
    parser.add_argument("--cases", nargs="+", metavar="NAME", help='such as 8192x96 "mixed x64"')
    parser.add_argument("--kind", choices=["prefill", "decode", "host"], help="all if left out")
    parser.add_argument("--decode-cases", nargs="+", metavar="NAME", help='such as "N1xH32 fp32"')
    parser.add_argument("--regime", nargs="+", default=records.REGIMES, choices=records.REGIMES)
    parser.add_argument(
        "--path",
        nargs="+",
        default=["auto"],
        choices=["auto", "sm80", "sm90", "sm90-forward"],
        help="this package's kernels; auto: what a user gets",
    )
    parser.add_argument("--quick", action="store_true", help="fewer samples, no second timing")
    parser.add_argument("--no-peers", action="store_true", help="only this package")
    parser.add_argument("--build", type=Path, metavar="FILE.json", help="commit and compiler")
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes on CPU tensors")
    parser.add_argument("--results", type=Path, help="bench/results/gpu.jsonl if left out")


def measure_case(clock, implementation, inputs, options):
    """Times of one implementation on one case, and its error."""
    call, _ = implementation.bind(inputs)
    clock.warm_up(call)
    slow = clock.samples_ms(call, 2)[1] > SLOW_MS
    count = 3 if options.dry_run else 10 if slow or options.quick else 30
    found = records.summarize(clock.samples_ms(call, count))
    found["kernel"] = implementation.kernel()
    again = None if options.quick else records.summarize(clock.samples_ms(call, count))
    found["again_ms"] = again and again["median_ms"]  # the same once more: the noise
    return found, count


def measure_own(clock, ours, inputs, options):
    """This package: also what a call costs that brings no workspace. The error is that of the path
    whose time was taken, also where fewer tokens would have got another."""
    from implementations import Ours, measure_error

    with ours.chosen():
        found, count = measure_case(clock, ours, inputs, options)
        call, _ = Ours(ours.path, keeps_workspace=False).bind(inputs)
        clock.warm_up(call)
        found["no_workspace_ms"] = records.summarize(clock.samples_ms(call, count))["median_ms"]
        found["note"] = ours.note()
    chosen = ours.path == "auto" and inputs.q.is_cuda
    same = Ours(found["kernel"].split("/")[1] if chosen else ours.path)
    with same.chosen():
        return found | {"path": ours.path} | measure_error(same, inputs)


def host_overhead(clock, device, name, path):
    """Host microseconds of an eager call until it returns: many calls in a row on an idle device,
    with a workspace of the caller's and without, beside the same calls made inside the extension on
    bound arguments, and empty kernels."""
    import torch
    from gpu_cases import case, make_inputs
    from implementations import Ours, fwd_arguments, new_outputs

    import flash_kda

    batches, calls = 20, 50
    shape = case(name)
    inputs = make_inputs(shape, "random", device, None)
    arguments = fwd_arguments(inputs, *new_outputs(inputs))
    size = flash_kda.get_workspace_size(shape.tokens, shape.H)
    workspace = torch.empty(size, dtype=torch.uint8, device=device)
    ours = Ours(path)
    call, _ = ours.bind(inputs)
    allocating, _ = Ours(path, keeps_workspace=False).bind(inputs)
    bound = (*arguments, workspace, *[None] * 4, True, True, True, False, *[None] * 3)

    def per_call_ms(function):
        clock.warm_up(function)
        samples = []
        for _ in range(batches):
            clock.wait()
            begin = time.perf_counter()
            for _ in range(calls):
                function()
            samples.append(1e3 * (time.perf_counter() - begin) / calls)
        clock.wait()
        return samples

    launch = records.summarize(per_call_ms(clock.launch))
    in_c = []
    with ours.chosen():
        for _ in range(batches):
            clock.wait()
            in_c.append(1e3 * flash_kda._C.time_call("fwd", calls, *bound) / calls)
        clock.wait()
        without = records.summarize(per_call_ms(allocating))
        found = records.summarize(per_call_ms(call))
    return found | {
        "kind": "overhead",
        "case": name,
        "regime": "random",
        "impl": Ours.name,
        "path": path,
        "kernel": ours.kernel(),
        "no_workspace_ms": without["median_ms"],
        "floor_ms": launch["median_ms"],
        "launch_ms": launch["median_ms"],
        "c_ms": records.summarize(in_c)["median_ms"],
        "bytes": None,
        "again_ms": None,
        "error_out": None,
        "error_state": None,
    }


def run_case(options, shape, regime, clock, device, common, peers):
    """Yields a record per implementation, ours first."""
    from gpu_cases import make_inputs
    from implementations import Ours, measure_error

    data = os.environ.get("FLASH_KDA_DATA", DATA)
    inputs = make_inputs(shape, regime, device, data)

    def measure():
        if isinstance(implementation, Ours):
            return measure_own(clock, implementation, inputs, options)
        found, _ = measure_case(clock, implementation, inputs, options)
        return found | measure_error(implementation, inputs)

    for implementation in (*map(Ours, options.path), *peers):
        record = records.take(
            measure,
            {**common, "kind": "prefill"},
            *(shape, regime, implementation.name),
            must_work=isinstance(implementation, Ours),
        )
        if record:
            yield record


def prepare(options):
    """Clock, device and the fields that all records share."""
    import torch
    from gpu_clock import CudaClock, HostClock

    if options.dry_run and options.results is None:
        sys.exit("run.py gpu: --dry-run wants --results: its records are no measurements")
    if not options.dry_run and not torch.cuda.is_available():
        sys.exit("run.py gpu: no CUDA device here (--dry-run tries the code without one)")
    device = torch.device("cpu" if options.dry_run else "cuda")
    clock = HostClock() if options.dry_run else CudaClock(device)
    build = json.loads(options.build.read_text()) if options.build else {}
    common = {
        "commit": build.get("commit") or records.commit_name(),
        "compiler": build.get("compiler") or "unknown",
        "torch": torch.__version__,
        **clock.describe(),
        "copy_gb_per_s": clock.copy_gb_per_s(),
    }
    return clock, device, common


def run(options):
    import torch

    clock, device, common = prepare(options)
    import gpu_cases
    import gpu_decode
    from implementations import installed_peers

    results = options.results or records.RESULTS / "gpu.jsonl"
    data = os.environ.get("FLASH_KDA_DATA", DATA)
    peers = [] if options.no_peers else installed_peers()
    start, count = time.perf_counter(), 0
    with torch.inference_mode():
        host = itertools.product(HOST_CASES, options.path)
        for name, path in host if options.kind in (None, "host") else ():
            load = [records.load_average()] * 2
            overhead = host_overhead(clock, device, name, path)
            stamp = {"date": records.utc_now(), "load": load}
            records.append(results, [{**common, **stamp, **overhead}])
            count += 1
        if options.kind in (None, "decode"):
            for record in gpu_decode.run(options, clock, device, common, data):
                records.append(results, [record])
                count += 1
                show(record, time.perf_counter() - start)
        for name in (options.cases or NAMES) if options.kind in (None, "prefill") else ():
            shape = gpu_cases.case(name)
            shape = shape.shrunk() if options.dry_run else shape
            for regime in options.regime:
                for record in run_case(options, shape, regime, clock, device, common, peers):
                    records.append(results, [record])
                    count += 1
                    show(record, time.perf_counter() - start)
    print(f"{count} records appended to {results}")


def show(record, seconds):
    print(
        f"[{seconds:5.0f} s] {record['case']:14} {record['regime']:8} {record['impl']:24}"
        f" {record['median_ms']:8.3f} ms, {record['median_ms'] / record['floor_ms']:5.1f} floors,"
        f" error {record['error_out']:.1e} / {record['error_state']:.1e}, {record['kernel']}",
        flush=True,
    )
