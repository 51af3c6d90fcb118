"""Benchmark records: one JSON object a line in bench/results/*.jsonl, appended, never edited."""

import datetime
import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results"
REGIMES = ("random", "trained", "slow")

# What every record has. None is allowed where a thing does not exist (a CPU has no driver) or was
# not measured (the error of a peer that returns none); a field is never left out.
COMMON = """commit date driver compiler kind case regime impl kernel samples median_ms p10_ms p90_ms
    floor_ms bytes error_out error_state""".split()
ON_CPU = """cpu isa precision threads load min_ms""".split()
ON_GPU = """gpu load again_ms copy_gb_per_s""".split()
KINDS = ("prefill", "decode", "backward", "overhead")


def missing_fields(record):
    """Names of required fields that the record does not have, or whose values make no sense."""
    wanted = COMMON + (ON_GPU if "gpu" in record else ON_CPU)
    wrong = [name for name in wanted if name not in record]
    if not wrong:
        ordered = record["p10_ms"] <= record["median_ms"] <= record["p90_ms"]
        wrong += [] if ordered and record["p10_ms"] > 0 else ["p10_ms", "median_ms", "p90_ms"]
        wrong += [] if record["samples"] >= 1 else ["samples"]
        wrong += [] if record["kind"] in KINDS else ["kind"]
        wrong += [] if record["regime"] in REGIMES else ["regime"]
        wrong += [] if record["kernel"] and record["impl"] else ["kernel"]
    return wrong


def append(path, records):
    records = list(records)
    for record in records:
        wrong = missing_fields(record)
        if wrong:
            raise ValueError(f"record of {record.get('case')}: missing or wrong {wrong}")
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a", encoding="utf-8") as file:
        for record in records:
            file.write(json.dumps(record) + "\n")


def load(folder):
    """Every record of the folder's files, each with `place`: what makes it newer than another."""
    records = []
    for path in sorted(folder.glob("*.jsonl")):
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            record = json.loads(line)
            records.append({**record, "place": (record["date"], path.name, number)})
    return records


def quantile(ordered, p):
    """The p-quantile (0 to 1) of ascending values, interpolated."""
    at = p * (len(ordered) - 1)
    i = int(at)
    return ordered[i] + (at - i) * (ordered[min(i + 1, len(ordered) - 1)] - ordered[i])


def summarize(samples_ms):
    ordered = sorted(samples_ms)
    return {
        "samples": len(ordered),
        "median_ms": quantile(ordered, 0.5),
        "p10_ms": quantile(ordered, 0.1),
        "p90_ms": quantile(ordered, 0.9),
        "min_ms": ordered[0],
    }


def utc_now():
    return datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def load_average():
    """Processes that wanted a processor in the last minute: 1 is this benchmark alone."""
    return round(os.getloadavg()[0], 2)


def take(measure, common, shape, regime, name, must_work):
    """The record of what measure() finds; None where it fails, unless it must work."""
    before = load_average()
    try:
        found = measure()
    except Exception as error:
        if must_work:
            raise
        print(f"{name} on {shape.name}: {error!r}", file=sys.stderr)
        return None
    return {
        **common,
        "date": utc_now(),
        "case": shape.name,
        "regime": regime,
        "impl": name,
        "bytes": shape.min_bytes,
        "floor_ms": 1e-6 * shape.min_bytes / common["copy_gb_per_s"],
        **found,
        "load": [before, load_average()],
    }


def git(*arguments):
    done = subprocess.run(["git", "-C", ROOT, *arguments], capture_output=True, text=True)
    return done.stdout.strip()


def commit_name():
    """The commit, marked where sources differ from it; records and documents do not count.
    FLASH_KDA_COMMIT names it where there is no repository."""
    if os.environ.get("FLASH_KDA_COMMIT"):
        return os.environ["FLASH_KDA_COMMIT"][:12]
    changed = git("status", "--porcelain", "--", "src", "include", "tools", "python", "cmake")
    return (git("rev-parse", "--short=12", "HEAD") or "unknown") + ("-dirty" if changed else "")


def processor_name():
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return "unknown"
