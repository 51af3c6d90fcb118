#!/usr/bin/env python3
"""Takes the CPU benchmark and appends its records to bench/results/cpu.jsonl.

    python3 bench/record_cpu.py [--program build/release/tools/flashkda/flashkda] [--quick]
                                [--threads N] [--case TEXT] [--regime NAME ...] [--no-torch]

Runs `flashkda bench --isa all --json` on random, slow and trained gates (the bundled activations,
or the recording that FLASH_KDA_DATA names), then, where PyTorch is installed, what one would write
without this library: the recurrence as a loop over tokens, on the same shapes and threads.
Pictures and tables are made from the records by bench/report.py.
"""

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PROGRAM = ROOT / "build" / "release" / "tools" / "flashkda" / "flashkda"
RESULTS = ROOT / "bench" / "results" / "cpu.jsonl"
DATA = os.environ.get("FLASH_KDA_DATA", str(ROOT / "data" / "kda_trained_slice.safetensors"))
HEADS, D = 32, 128


def git(*arguments):
    done = subprocess.run(["git", "-C", ROOT, *arguments], capture_output=True, text=True)
    return done.stdout.strip()


def commit_name():
    """The commit, marked where sources differ from it; records and documents do not count."""
    changed = git("status", "--porcelain", "--", "src", "include", "tools", "CMakeLists.txt")
    return git("rev-parse", "--short=12", "HEAD") + ("-dirty" if changed else "")


def run_program(options, regime, commit):
    command = [options.program, "bench", "--json", "--quiet", "--isa", "all", "--commit", commit]
    command += ["--input", DATA] if regime == "trained" else ["--regime", regime]
    command += ["--quick"] if options.quick else []
    command += ["--threads", str(options.threads)] if options.threads else []
    command += ["--case", options.case] if options.case else []
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode != 0:
        sys.exit(f"record_cpu.py: {' '.join(map(str, command))}: exit code {done.returncode}")
    return [json.loads(line) for line in done.stdout.splitlines()]


def torch_recurrence(torch, q, k, v, g, beta, A_log, dt_bias, scale, lower_bound):
    """[T, H, D] each: norms, gate and sigmoid for all tokens at once, then token by token."""
    q, k, v, g, beta = (x.float() for x in (q, k, v, g, beta))
    q = q * torch.rsqrt((q * q).sum(-1, keepdim=True) + 1e-6) * scale
    k = k * torch.rsqrt((k * k).sum(-1, keepdim=True) + 1e-6)
    decay = torch.exp(lower_bound * torch.sigmoid(A_log.exp()[:, None] * (g + dt_bias)))
    beta = torch.sigmoid(beta)[..., None]
    S = torch.zeros(q.shape[1], D, D)
    out = torch.empty_like(v)
    for t in range(q.shape[0]):
        S = S * decay[t, :, None, :]
        u = beta[t] * (v[t] - torch.einsum("hvk,hk->hv", S, k[t]))
        S = S + u[:, :, None] * k[t, :, None, :]
        out[t] = torch.einsum("hvk,hk->hv", S, q[t])
    return out.bfloat16(), S


def time_torch(torch, T, threads, min_samples, seconds):
    torch.set_num_threads(threads)
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    rows = [normal(T, HEADS, D).bfloat16() for _ in range(4)] + [normal(T, HEADS).bfloat16()]
    arguments = (*rows, torch.rand(HEADS, generator=generator), normal(HEADS, D))
    samples = []
    with torch.inference_mode():
        while len(samples) < min_samples or sum(samples) < seconds:
            begin = time.perf_counter()
            torch_recurrence(torch, *arguments, scale=D**-0.5, lower_bound=-5.0)
            samples.append(time.perf_counter() - begin)
    return sorted(1e3 * x for x in samples)


def quantile(ordered, p):
    at = p * (len(ordered) - 1)
    i = int(at)
    return ordered[i] + (at - i) * (ordered[min(i + 1, len(ordered) - 1)] - ordered[i])


def torch_records(options, ours):
    """A record for every prefill case and thread count among `ours` (random gates), beside the
    floor of the widest vectors that the same run measured."""
    try:
        import torch
    except ImportError:
        print("no PyTorch here: its recurrence is left out", file=sys.stderr)
        return
    wanted = {}
    for record in ours:
        if record["kind"] == "prefill" and record["regime"] == "random":
            key = record["case"], record["threads"]
            if key not in wanted or record["floor_ms"] < wanted[key]["floor_ms"]:
                wanted[key] = record
    for (case, threads), like in wanted.items():
        T = int(case.split("x")[0])
        samples = time_torch(torch, T, threads, 1 if options.quick else 3, 0.1)
        same = "commit cpu driver kind case regime threads floor_ms bytes flops copy_gb_per_s"
        yield {
            **{key: like[key] for key in same.split()},
            "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "compiler": f"CPython {platform.python_version()}",
            "impl": f"PyTorch recurrence {torch.__version__}",
            "kernel": "torch/loop",
            "isa": "torch",
            "precision": "fp32",
            "samples": len(samples),
            "median_ms": statistics.median(samples),
            "p10_ms": quantile(samples, 0.1),
            "p90_ms": quantile(samples, 0.9),
            "min_ms": samples[0],
            "error_out": None,
            "error_state": None,
        }


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--program", default=PROGRAM)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--case")
    parser.add_argument("--regime", nargs="+", default=["random", "slow", "trained"])
    parser.add_argument("--no-torch", action="store_true")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    commit = commit_name()
    records = []
    for regime in options.regime:
        print(f"flashkda bench, {regime} gates", file=sys.stderr)
        records += run_program(options, regime, commit)
    if not options.no_torch:
        print("PyTorch recurrence", file=sys.stderr)
        records += torch_records(options, records)
    options.results.parent.mkdir(parents=True, exist_ok=True)
    with open(options.results, "a", encoding="utf-8") as file:
        for record in records:
            file.write(json.dumps(record) + "\n")
    print(f"{len(records)} records appended to {options.results}")


if __name__ == "__main__":
    main()
