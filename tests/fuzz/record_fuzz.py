"""Runs a libFuzzer target for a number of inputs and appends what happened to records.jsonl.

    python3 tests/fuzz/record_fuzz.py build/fuzz/tests/fuzz/fuzz_validate --inputs 10000000

The run is cut into slices that hand the corpus on; the first slice that finds something ends it,
is recorded too, and makes this script fail.
"""

import argparse
import datetime
import json
import platform
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent


def git(*command: str) -> str:
    done = subprocess.run(["git", "-C", HERE, *command], capture_output=True, text=True)
    return done.stdout.strip()


def processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    found = cpuinfo.exists() and re.search(r"model name\s*: (.*)", cpuinfo.read_text())
    return found.group(1) if found else platform.processor()


def built_with(target: Path) -> dict[str, str]:
    """Compiler and sanitizers, from the CMake cache above the target."""
    cache = next(p / "CMakeCache.txt" for p in target.parents if (p / "CMakeCache.txt").exists())
    text = cache.read_text()
    compiler = re.search(r"^CMAKE_C_COMPILER:\w+=(.*)$", text, re.M).group(1)
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True).stdout
    sanitizers = re.search(r"^FLASH_KDA_SANITIZE:\w+=(.*)$", text, re.M).group(1)
    return {"compiler": version.splitlines()[0], "sanitizers": "fuzzer," + sanitizers}


def fill_corpus(name: str, corpus: Path) -> list[str]:
    """Seeds, and libFuzzer's options for them, as run_fuzz.sh has them."""
    corpus.mkdir(parents=True, exist_ok=True)
    options, words = ["-max_len=4096"], HERE / f"{name}.dict"
    if (HERE / "corpus" / name).exists():
        shutil.copytree(HERE / "corpus" / name, corpus, dirs_exist_ok=True)
    else:
        subprocess.run([sys.executable, HERE / "make_seeds.py", corpus], check=True)
        options = ["-max_len=512", "-len_control=0"]
    return [*options, f"-dict={words}"] if words.exists() else options


def run_slice(command: list, work: Path, inputs: int, seconds: int, seed: int) -> dict:
    log = work / "log"
    command = [*command, f"-runs={inputs}", f"-max_total_time={seconds}", f"-seed={seed}"]
    command += ["-timeout=20", "-rss_limit_mb=2048", "-print_final_stats=1", "corpus"]
    with log.open("w") as stream:
        status = subprocess.run(command, cwd=work, stderr=stream).returncode
    text = log.read_text(errors="replace")
    executed = re.search(r"stat::number_of_executed_units: (\d+)", text)
    edges = re.findall(r" cov: (\d+) ", text)
    return {
        "status": status,
        "inputs": int(executed.group(1)) if executed else 0,
        "edges": int(edges[-1]) if edges else 0,
        "tail": text[-3000:],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", type=Path)
    parser.add_argument("--inputs", type=int, default=10_000_000)
    parser.add_argument("--slice-seconds", type=int, default=240)
    parser.add_argument("--records", type=Path, default=HERE / "records.jsonl")
    args = parser.parse_args()
    target = args.target.resolve()
    work = Path(f"{target}.record")
    options = fill_corpus(target.name.removeprefix("fuzz_"), work / "corpus")
    commit = git("rev-parse", "HEAD") + ("-dirty" if git("status", "--porcelain") else "")
    began, inputs, slices, part = time.monotonic(), 0, 0, {"status": 0, "edges": 0}
    while inputs < args.inputs and part["status"] == 0:
        slices += 1
        part = run_slice([target, *options], work, args.inputs - inputs, args.slice_seconds, slices)
        inputs += part["inputs"]
        print(f"slice {slices}: {inputs} inputs, {part['edges']} edges", flush=True)
    record = {
        "commit": commit,
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
        "target": target.name,
        "cpu": processor(),
        **built_with(target),
        "inputs": inputs,
        "slices": slices,
        "seconds": round(time.monotonic() - began),
        "edges": part["edges"],
        "corpus_files": len(list((work / "corpus").iterdir())),
        "findings": int(part["status"] != 0),
    }
    with args.records.open("a") as stream:
        stream.write(json.dumps(record) + "\n")
    print(json.dumps(record))
    if part["status"]:
        print(part["tail"], file=sys.stderr)
    return int(part["status"] != 0)


if __name__ == "__main__":
    sys.exit(main())
