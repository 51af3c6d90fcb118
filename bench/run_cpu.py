"""The CPU benchmark: `flashkda bench` in three gate regimes, the recurrence in plain PyTorch beside
it in the same run, and what a Python call costs above the C call."""

import importlib.util
import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import records
from torch_recurrence import time_recurrence

PROGRAMS = ("build/release", "build-release", "build")
DATA = str(records.ROOT / "data" / "kda_trained_slice.safetensors")


def add_options(parser):
    parser.add_argument("--program", type=Path, help="flashkda; the release build's if left out")
    parser.add_argument("--quick", action="store_true", help="fewer cases and samples")
    parser.add_argument("--threads", type=int, help="only this many, instead of one and all")
    parser.add_argument("--case", help="only cases that contain this text")
    parser.add_argument("--regime", nargs="+", default=records.REGIMES, choices=records.REGIMES)
    parser.add_argument("--no-torch", action="store_true", help="without the PyTorch recurrence")
    parser.add_argument("--no-overhead", action="store_true", help="without the Python calls")
    parser.add_argument("--results", type=Path, default=records.RESULTS / "cpu.jsonl")


def find_program(options):
    if options.program:
        return options.program
    for folder in PROGRAMS:
        path = records.ROOT / folder / "tools" / "flashkda" / "flashkda"
        if path.exists():
            return path
    sys.exit("run.py: no flashkda in build/release: cmake --preset release, or name --program")


def call_json_lines(command):
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode != 0:
        sys.exit(f"run.py: {' '.join(map(str, command))}: exit code {done.returncode}")
    return [json.loads(line) for line in done.stdout.splitlines()]


def program_records(options, regime, commit):
    """One per case, kernel set and number of threads. The program measures the ceilings itself."""
    data = os.environ.get("FLASH_KDA_DATA", DATA)
    command = [find_program(options), "bench", "--json", "--quiet", "--isa", "all"]
    command += ["--commit", commit]
    command += ["--input", data] if regime == "trained" else ["--regime", regime]
    command += ["--quick"] if options.quick else []
    command += ["--threads", str(options.threads)] if options.threads else []
    command += ["--case", options.case] if options.case else []
    before = records.load_average()
    found = call_json_lines(command)
    load = [before, records.load_average()]
    return [{**record, "load": load} for record in found]


def torch_records(options, ours):
    """A record for every prefill case and thread count among `ours` (random gates), beside the
    floor of the widest vectors that the same run measured."""
    import torch

    wanted = {}
    for record in ours:
        fp32 = record["kind"] == "prefill" and record["precision"] == "fp32"
        if fp32 and record["regime"] == "random":
            key = record["case"], record["threads"]
            if key not in wanted or record["floor_ms"] < wanted[key]["floor_ms"]:
                wanted[key] = record
    same = "commit cpu driver kind case regime threads floor_ms bytes flops copy_gb_per_s".split()
    for (case, threads), like in wanted.items():
        before = records.load_average()
        samples, busy = time_recurrence(
            int(case.split("x")[0]), threads, 1 if options.quick else 3, 0.1
        )
        yield {
            **{name: like[name] for name in same},
            "date": records.utc_now(),
            "compiler": f"CPython {platform.python_version()}",
            "impl": f"PyTorch recurrence {torch.__version__}",
            "kernel": "torch/loop",
            "isa": "torch",
            "precision": "fp32",
            **records.summarize(samples),
            "min_cpu_ms": min(busy),
            "error_out": None,
            "error_state": None,
            "load": [before, records.load_average()],
        }


def overhead_records(commit):
    """What bench/call_overhead.py measures, in a process of its own."""
    before = records.load_average()
    script = records.ROOT / "bench" / "call_overhead.py"
    found = call_json_lines([sys.executable, script, "--json"])
    for record in found:
        yield {
            "commit": commit,
            "date": records.utc_now(),
            "cpu": records.processor_name(),
            "driver": None,
            "compiler": f"CPython {platform.python_version()}",
            **record,
            "load": [before, records.load_average()],
        }


def can_import(*names):
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        print(f"left out, since {', '.join(missing)} is not installed", file=sys.stderr)
    return not missing


def run(options):
    commit, count, ours = records.commit_name(), 0, []
    for regime in options.regime:
        print(f"flashkda bench, {regime} gates", file=sys.stderr)
        found = program_records(options, regime, commit)
        records.append(options.results, found)
        ours += found
    count = len(ours)
    if not options.no_torch:
        print("PyTorch recurrence", file=sys.stderr)
        if can_import("torch"):
            for record in torch_records(options, ours):
                records.append(options.results, [record])
                count += 1
    if not options.no_overhead:
        print("Python calls", file=sys.stderr)
        if can_import("flash_kda", "torch", "numpy"):
            found = list(overhead_records(commit))
            records.append(options.results, found)
            count += len(found)
    print(f"{count} records appended to {options.results}")
