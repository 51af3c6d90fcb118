#!/usr/bin/env python3
"""The record of GPU test runs, and whether it speaks of the kernels as they are now.

    python3 tests/gpu/gpu_record.py              says so in one line; exits with 0 either way
    python3 tests/gpu/gpu_record.py --write      shows the newest record in README.md
    python3 tests/gpu/gpu_record.py --add FILE   takes over the records of another machine, and that

Machines that check every commit have no GPU. A run on one appends a line to records.jsonl with a
hash of the kernels' sources, and this says whether they have changed since.
"""

import argparse
import datetime
import hashlib
import json
import os
import pathlib
import re
import subprocess

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
RECORDS = HERE / "records.jsonl"
README = ROOT / "README.md"
BEGIN, END = "<!-- gpu_record.py --write: begin -->\n", "<!-- gpu_record.py --write: end -->\n"


def hash_kernels():
    """Of everything that decides what runs on the GPU: names and contents below src/cuda, and the
    numbers that all backends share."""
    digest = hashlib.sha256()
    src = ROOT / "src"
    for path in sorted([*(src / "cuda").rglob("*"), *src.glob("core/constants.h")]):
        if path.suffix in {".cu", ".cuh", ".c", ".h"}:
            digest.update(path.relative_to(ROOT).as_posix().encode() + b"\0")
            digest.update(path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def _output(*command):
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def commit():
    """FLASH_KDA_COMMIT where the tree was copied without its history."""
    told = os.environ.get("FLASH_KDA_COMMIT")
    if told:
        return told
    changed = _output("git", "status", "--porcelain", "--untracked-files=no")
    return _output("git", "rev-parse", "HEAD") + ("-dirty" if changed else "") or "unknown"


def driver():
    text = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return text.splitlines()[0] if text else "unknown"


def append(gpu, passed, failed, skipped, seconds, command, versions):
    """One line for one run. `skipped` is {reason: number of tests}."""
    now = datetime.datetime.now(datetime.timezone.utc)
    line = {
        "commit": commit(),
        "date": now.strftime("%Y-%m-%d"),
        "gpu": gpu,
        "driver": driver(),
        "kernels": hash_kernels(),
        "passed": passed,
        "failed": failed,
        "skipped": skipped,
        "seconds": round(seconds, 1),
        "command": command,
        **versions,
    }
    path = pathlib.Path(os.environ.get("FLASH_KDA_GPU_RECORDS") or RECORDS)
    with path.open("a") as file:
        file.write(json.dumps(line) + "\n")
    return line


def read():
    if not RECORDS.exists():
        return []
    return [json.loads(line) for line in RECORDS.read_text().splitlines() if line.strip()]


def state():
    """(is the newest record of these kernels and without a failure?, the sentence that says so)"""
    records = read()
    if not records:
        return False, "GPU tests: no run is recorded"
    last = records[-1]
    skipped = sum(last["skipped"].values())
    done = (
        f"{last['passed']} passed, {last['failed']} failed, {skipped} skipped "
        f"on {last['gpu']} at commit {last['commit'][:12]} ({last['date']})"
    )
    if last["kernels"] != hash_kernels():
        return False, f"GPU tests: {done}; the kernels have changed since"
    return last["failed"] == 0, f"GPU tests: {done}; the kernels are the same"


def table(record):
    """What README shows: the record alone, so that it stays true while the sources change."""
    row = {
        "GPU": record["gpu"],
        "passed": record["passed"],
        "failed": record["failed"],
        "skipped": sum(record["skipped"].values()),
        "commit": f"`{record['commit'][:12]}`",
        "date": record["date"],
        "hash of the kernels": f"`{record['kernels']}`",
        "built for": record["archs"],
        "driver": record["driver"],
        "torch": record["torch"],
    }
    lines = (row, ["---"] * len(row), row.values())
    return "".join(f"| {' | '.join(map(str, line))} |\n" for line in lines)


def put_into(text, record):
    """README's text with this record in its place."""
    pattern = re.compile(f"(?<={re.escape(BEGIN)}).*?(?={re.escape(END)})", re.S)
    changed, places = pattern.subn(lambda _: table(record), text)
    assert places == 1, f"README.md: wanted one place between {BEGIN!r} and {END!r}"
    return changed


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--add", type=pathlib.Path, metavar="FILE")
    options = parser.parse_args()
    if options.add:
        added = [json.loads(line) for line in options.add.read_text().splitlines() if line.strip()]
        with RECORDS.open("a") as file:
            file.writelines(json.dumps(record) + "\n" for record in added)
    if options.write or options.add:
        README.write_text(put_into(README.read_text(), read()[-1]))
    print(state()[1])


if __name__ == "__main__":
    main()
