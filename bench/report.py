#!/usr/bin/env python3
"""Makes docs/benchmarks.md and its pictures from the records in bench/results/*.jsonl.

    python3 bench/report.py [--check] [--no-pictures] [--results FOLDER] [--document FILE.md]

Of records of the same device, kind, case, gates, implementation, kernel, precision and threads the
newest one is shown; on a GPU the path that was asked for counts, not the kernel. --check writes
nothing and fails where the document or a picture is not what the records say. Pictures need
matplotlib; without it the document is written all the same.
"""

import argparse
import sys
from pathlib import Path

import records
import report_cpu
import report_gpu
import report_pictures
import report_summary

DOCUMENT = records.ROOT / "docs" / "benchmarks.md"
SAME = "cpu gpu kind case regime impl_name kernel isa precision threads".split()

HEADING = """# Benchmarks

<!-- Written by bench/report.py from bench/results/*.jsonl: take new records, do not edit this. -->

"""

TEXT = """## How it was measured

Every figure below comes from a record in [bench/results](../bench/results): one line of JSON with
commit, device, compiler, samples, median, p10 and p90. To take new ones and write this document:

```text
python3 bench/run.py cpu     # flashkda bench, the recurrence in PyTorch, what a Python call costs
python3 bench/run.py gpu     # on a machine with a GPU, this package and PyTorch
python3 bench/report.py
```

Three gate regimes, named with every figure. **random**: q, k, v, g and beta normal, A_log and
dt_bias uniform in [0, 1). **trained**: the activations in [data](../data), layers side by side as
heads, tiled to size. **slow**: as random, but g normal around -8.5 with deviation 0.5, A_log and
dt_bias 0 (log-decay near -0.001: almost nothing is forgotten). lower_bound is -5, inputs and
outputs are bf16, states fp32.

**error** is RMS(error) / RMS(reference) against the float64 definition, out and final state.
Rounding a result to bf16 alone costs about 1.66e-3.

"""


def newest(found):
    chosen = {}
    for record in found:
        if record.get("dry_run"):
            continue
        record["impl_name"] = record["impl"].rsplit(" ", 1)[0]
        # A GPU's kernel is chosen by the library, or by run.py's --path: the choice is what counts.
        same = [name for name in SAME if name != "kernel" or not record.get("gpu")]
        key = (record.get("path", "auto"), *(record.get(name) for name in same))
        if key not in chosen or chosen[key]["place"] < record["place"]:
            chosen[key] = record
    return list(chosen.values())


def by_device(chosen, field):
    devices = sorted({r[field] for r in chosen if r.get(field)})
    return {name: [r for r in chosen if r.get(field) == name] for name in devices}


def make_document(chosen):
    """The text, and {file name: (draw function, records)} of its pictures."""
    sections = {"gpu": report_gpu.section, "cpu": report_cpu.section}
    devices = [
        (field, device, [r for r in own if field == "gpu" or not r.get("gpu")])
        for field in sections
        for device, own in by_device(chosen, field).items()
    ]
    text, pictures = HEADING + report_summary.section(devices) + TEXT, {}
    for field, device, own in devices:
        part, drawn = sections[field](device, own)
        text += part
        pictures |= drawn
    return text.rstrip("\n") + "\n", pictures


def check(options, text, pictures):
    if not options.document.exists() or options.document.read_text(encoding="utf-8") != text:
        sys.exit(f"{options.document} is not what the records say: run bench/report.py")
    for name, (_, drawn) in pictures.items() if options.pictures else ():
        path = options.document.parent / name
        if not path.exists() or report_pictures.stamp_of(path) != report_pictures.stamp(drawn):
            sys.exit(f"{path} is not drawn from the records: run bench/report.py")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--results", type=Path, default=records.RESULTS, help="folder of records")
    parser.add_argument("--document", type=Path, default=DOCUMENT)
    parser.add_argument("--no-pictures", dest="pictures", action="store_false")
    options = parser.parse_args()
    chosen = newest(records.load(options.results))
    if not chosen:
        sys.exit(f"report.py: no records in {options.results}")
    text, pictures = make_document(chosen)
    if options.check:
        return check(options, text, pictures)
    options.document.write_text(text, encoding="utf-8")
    print(f"{options.document}: {len(chosen)} records")
    if options.pictures and not report_pictures.draw_all(options.document.parent, pictures):
        print("no pictures: matplotlib is not installed", file=sys.stderr)


if __name__ == "__main__":
    main()
