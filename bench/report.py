#!/usr/bin/env python3
"""Makes docs/benchmarks.md and its picture from the records in bench/results/*.jsonl.

    python3 bench/report.py [--check]

Of records with the same processor, case, gates, kernel and threads the newest one is shown.
--check writes nothing and fails where the document is not what the records say. The picture needs
matplotlib; without it the document is written all the same.
"""

import argparse
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results"
DOCUMENT = ROOT / "docs" / "benchmarks.md"
PICTURE = "benchmarks-cpu.png"  # beside the document
SAME = ("cpu", "kind", "case", "regime", "impl_name", "isa", "precision", "threads")
COLOURS = {
    ("portable", "fp32"): "#9aa5b1",
    ("avx2", "fp32"): "#6b9fd1",
    ("avx512", "fp32"): "#2f6db0",
    ("avx512_bf16", "bf16"): "#e0a458",
    ("amx_bf16", "bf16"): "#c0562f",
    ("torch", "fp32"): "#444444",
}

TEXT = """# Benchmarks

<!-- Written by bench/report.py from bench/results/*.jsonl: take new records, do not edit this. -->

How to take them: `python3 bench/record_cpu.py`, then `python3 bench/report.py`. `flashkda bench`
alone prints the same as a table.

* A row is the median of its samples; p10 and p90 lie beside it in the records.
* **of FMA** is the useful work, 98.3 kFLOP a token and head, as a share of the peak of the kernel
  set's fp32 multiply-add units on as many threads, measured in the same run on the same machine.
  Work that a kernel does beyond the useful (norms, gates, exponentials, the solve inside a chunk)
  counts against it. Kernels with bf16 products may pass 100 %: their units are faster.
* **of copy** is the memory that a call must move (inputs, outputs, states once each) as a share of
  the bandwidth measured in the same run, bytes read plus bytes written.
* **error** is RMS(error) / RMS(reference) of one head against the float64 definition. Rounding a
  result to bf16 alone costs about 1.66e-3.
* The PyTorch row is the recurrence as a loop over tokens: what one would write without a library.

{sections}"""


def load_records(folder):
    newest = {}
    for path in sorted(folder.glob("*.jsonl")):
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            record = json.loads(line)
            if "cpu" not in record:
                continue
            record["impl_name"] = record["impl"].rsplit(" ", 1)[0]
            record["place"] = (record["date"], path.name, number)
            key = tuple(record.get(name) for name in SAME)
            if key not in newest or newest[key]["place"] < record["place"]:
                newest[key] = record
    return list(newest.values())


def size_of(record):
    """Orders cases by their size: 512x32 before 2048x32, N1xH32 before N64xH32."""
    return [int(x) for x in record["case"].replace("N", "").replace("H", "").split("x")]


def share(record, unit, amount, peak):
    """A rate and its share of the ceiling, or a dash where the record has no such ceiling."""
    rate = record[amount] / record["median_ms"] / 1e6
    ceiling = record.get(peak)
    return f"{rate:.1f} | " + (f"{100 * rate / ceiling:.0f} %" if ceiling else "-")


def error_text(value):
    return "-" if value is None else f"{value:.2e}"


def table(records):
    lines = [
        "| case | gates | kernel | threads | ms | GFLOP/s | of FMA | GB/s | of copy | out error |"
        " state error |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for r in records:
        kernel = r["impl"] if r["isa"] == "torch" else f"`{r['kernel']}`"
        lines.append(
            f"| {r['kind']} {r['case']} | {r['regime']} | {kernel} | {r['threads']} |"
            f" {r['median_ms']:.3g} | {share(r, 'GFLOP/s', 'flops', 'fma_peak_gflops')} |"
            f" {share(r, 'GB/s', 'bytes', 'copy_gb_per_s')} |"
            f" {error_text(r['error_out'])} | {error_text(r['error_state'])} |"
        )
    return "\n".join(lines)


def ceilings(records):
    """The best of every ceiling, by kernel set and threads."""
    fma, copy = {}, {}
    for r in records:
        if r["isa"] != "torch":
            key = r["threads"], r["isa"]
            fma[key] = max(fma.get(key, 0), r["fma_peak_gflops"])
        copy[r["threads"]] = max(copy.get(r["threads"], 0), r["copy_gb_per_s"])
    lines = ["| threads | fp32 multiply-add peak, GFLOP/s | memory, GB/s |", "|---|---|---|"]
    for threads in sorted(copy):
        peaks = [f"{isa} {rate:.0f}" for (t, isa), rate in fma.items() if t == threads]
        lines.append(f"| {threads} | {', '.join(peaks)} | {copy[threads]:.1f} |")
    return "\n".join(lines)


def section(cpu, records):
    records.sort(
        key=lambda r: (
            r["kind"] != "prefill",
            size_of(r),
            r["regime"],
            r["threads"],
            r["isa"] == "torch",
            r["median_ms"],
        )
    )
    commits = sorted({r["commit"] for r in records})
    compilers = sorted({r["compiler"] for r in records if r["isa"] != "torch"})
    return "\n".join(
        [
            f"## {cpu}",
            "",
            f"Commits: {', '.join(commits)}. Compiler: {', '.join(compilers)}.",
            "",
            ceilings(records),
            "",
            table(records),
            "",
        ]
    )


def make_document(records):
    sections = []
    for cpu in sorted({r["cpu"] for r in records}):
        sections.append(section(cpu, [r for r in records if r["cpu"] == cpu]))
    if records:
        sections.insert(0, f"![Prefill on one thread beside the core's peak]({PICTURE})\n")
    return TEXT.format(sections="\n".join(sections))


def draw_picture(records, path):
    """Prefill on one thread, random gates: GFLOP/s, with the widest FMA peak as the top line."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    chosen = [
        r
        for r in records
        if r["kind"] == "prefill" and r["regime"] == "random" and r["threads"] == 1
    ]
    machines = sorted({r["cpu"] for r in chosen})
    if not machines:
        return False
    figure, grid = pyplot.subplots(
        1, len(machines), figsize=(7.5 * len(machines), 4.8), squeeze=False
    )
    for axes, cpu in zip(grid[0], machines):
        own = [r for r in chosen if r["cpu"] == cpu]
        cases = sorted({r["case"] for r in own}, key=lambda case: size_of({"case": case}))
        kinds = [kind for kind in COLOURS if any((r["isa"], r["precision"]) == kind for r in own)]
        for j, (isa, precision) in enumerate(kinds):
            for r in own:
                if (r["isa"], r["precision"]) == (isa, precision):
                    x = cases.index(r["case"]) + (j - (len(kinds) - 1) / 2) * 0.8 / len(kinds)
                    rate = r["flops"] / r["median_ms"] / 1e6
                    axes.bar(x, rate, 0.8 / len(kinds), color=COLOURS[isa, precision])
                    axes.text(x, rate, f"{rate:.0f}", ha="center", va="bottom", fontsize=7)
            label = "PyTorch loop" if isa == "torch" else f"{isa}, {precision}"
            axes.bar(0, 0, color=COLOURS[isa, precision], label=label)
        peaks = {r["isa"]: r["fma_peak_gflops"] for r in own if r["isa"] != "torch"}
        top = max(peaks.values())
        axes.axhline(top, color="#b03a2e")
        axes.text(-0.5, top, f" fp32 peak of this core: {top:.0f}", color="#b03a2e", va="bottom")
        axes.set_xticks(range(len(cases)), [f"{case.split('x')[0]} tokens" for case in cases])
        axes.set_ylabel("useful GFLOP/s, one thread")
        axes.set_title(cpu, fontsize=10)
        axes.legend(fontsize=8, loc="upper center", ncols=3, bbox_to_anchor=(0.5, -0.1))
        axes.spines[["top", "right"]].set_visible(False)
        axes.margins(y=0.15)
    figure.tight_layout()
    figure.savefig(path, dpi=140)
    return True


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the records")
    parser.add_argument("--document", type=Path, default=DOCUMENT)
    options = parser.parse_args()
    records = load_records(options.results)
    if not records:
        sys.exit(f"report.py: no records in {options.results}")
    text = make_document(records)
    if options.check:
        if not options.document.exists() or options.document.read_text(encoding="utf-8") != text:
            sys.exit(f"{options.document} is not what the records say: run bench/report.py")
        return
    options.document.write_text(text, encoding="utf-8")
    print(f"{options.document}: {len(records)} records")
    if not draw_picture(records, options.document.parent / PICTURE):
        print("no picture: matplotlib or prefill records are missing", file=sys.stderr)


if __name__ == "__main__":
    main()
