"""The pictures of docs/benchmarks.md. Each file carries a stamp of the records it was drawn from,
so that a picture which is older than its records is noticed."""

import hashlib
import json
import struct

from gpu_names import NAMES
from report_text import best_ms, ours_first, size_of

INK, RED = "#333333", "#b03a2e"
SETS = {  # (kernel set, precision): colour
    ("portable", "fp32"): "#9aa5b1",
    ("avx2", "fp32"): "#6b9fd1",
    ("avx512", "fp32"): "#2f6db0",
    ("avx512_bf16", "bf16"): "#e0a458",
    ("amx_bf16", "bf16"): "#c0562f",
}
REGIME_COLOURS = {"random": "#2f6db0", "trained": "#c0562f", "slow": "#4f9d69"}
MARKERS = "osD^vP"


def stamp(drawn):
    """A hash of records, in any order."""
    lines = sorted(json.dumps({**r, "place": None}, sort_keys=True) for r in drawn)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def stamp_of(path):
    """The stamp in a PNG file: its text chunk "Description"."""
    data, at = path.read_bytes(), 8
    while at < len(data):
        (size,) = struct.unpack(">I", data[at : at + 4])
        if data[at + 4 : at + 8] == b"tEXt":
            key, _, value = data[at + 8 : at + 8 + size].partition(b"\0")
            if key == b"Description":
                return value.decode()
        at += 12 + size
    return None


def draw_all(folder, pictures):
    """False without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    pyplot.rcParams.update({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False})
    for name, (draw, drawn) in pictures.items():
        figure = draw(pyplot, drawn)
        figure.tight_layout()
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        metadata = {"Description": stamp(drawn), "Software": None}
        figure.savefig(path, dpi=110, metadata=metadata)
        pyplot.close(figure)
    return True


def draw_cpu_prefill(pyplot, found):
    """Share of the machine's widest FMA peak on one thread, the time per token and head on it."""
    own = [r for r in found if (r["kind"], r["regime"], r["threads"]) == ("prefill", "random", 1)]
    own = [r for r in own if (r["isa"], r["precision"]) in SETS]
    figure, axes = pyplot.subplots(figsize=(8.5, 4.6))
    cases = sorted({r["case"] for r in own}, key=size_of)
    kinds = [kind for kind in SETS if any((r["isa"], r["precision"]) == kind for r in own)]
    width = 0.84 / max(len(kinds), 1)
    for r in own:
        kind = r["isa"], r["precision"]
        peak = max(s["fma_peak_gflops"] for s in own if s["commit"] == r["commit"])
        share = r["flops"] / best_ms(r) / 1e6 / peak
        x = cases.index(r["case"]) + (kinds.index(kind) - (len(kinds) - 1) / 2) * width
        tokens, heads = size_of(r["case"])
        axes.bar(x, 100 * share, width * 0.94, color=SETS[kind])
        text = f"{1e6 * best_ms(r) / tokens / heads:.0f}"
        axes.text(x, 100 * share, text, ha="center", va="bottom", fontsize=7.5, color=INK)
    for isa, precision in kinds:
        axes.bar(0, 0, color=SETS[isa, precision], label=f"{isa}, {precision}")
    axes.axhline(100, color=RED, linewidth=1)
    peak = max((r["fma_peak_gflops"] for r in own), default=0)
    text = f"fp32 multiply-add peak of this core: {peak:.0f} GFLOP/s"
    axes.text(-0.48, 101, text, color=RED, va="bottom")
    axes.set_xticks(range(len(cases)), [f"T {case.split('x')[0]}" for case in cases])
    axes.set_ylabel("useful work, % of the fp32 peak")
    axes.set_title("Prefill, one thread, 32 heads, random gates; bars: ns per token and head")
    axes.legend(fontsize=8, loc="upper center", ncols=5, bbox_to_anchor=(0.5, -0.08), frameon=False)
    axes.margins(y=0.12)
    return figure


def draw_cpu_threads_decode(pyplot, found):
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(8.5, 3.6))
    known = [r for r in found if r["regime"] == "random" and r["isa"] != "torch"]
    prefill = [r for r in known if r["kind"] == "prefill" and (r["isa"], r["precision"]) in SETS]
    most = max((r["threads"] for r in known), default=1)
    for kind, colour in SETS.items():
        own = [r for r in prefill if (r["isa"], r["precision"]) == kind]
        points = []
        for case in sorted({r["case"] for r in own}, key=size_of):
            ms = {r["threads"]: r["min_ms"] for r in own if r["case"] == case}
            if 1 in ms and most in ms and most > 1:
                points.append((size_of(case)[0], ms[1] / ms[most]))
        if points:
            left.plot(*zip(*points), "o-", color=colour, label=", ".join(kind))
    left.axhline(most, color=RED, linewidth=1)
    left.set_xscale("log", base=2)
    left.set_ylim(0, most * 1.1)
    left.set_xticks([512, 2048, 8192], ["T 512", "T 2048", "T 8192"])
    load = max((x for r in prefill for x in r["load"]), default=0)
    left.set_title(
        f"Prefill: gain of {most} threads over one (load average {load:.0f})", fontsize=9
    )
    if left.get_legend_handles_labels()[0]:
        left.legend(
            fontsize=7, frameon=False, loc="upper center", ncols=2, bbox_to_anchor=(0.5, -0.1)
        )
    decode = [r for r in known if r["kind"] == "decode" and r["threads"] == 1]
    labels = sorted({r["case"] for r in decode}, key=size_of)
    sets = [isa for isa in ("portable", "avx2", "avx512") if any(r["isa"] == isa for r in decode)]
    width = 0.8 / max(len(sets), 1)
    for r in decode:
        if r["isa"] in sets:
            x = labels.index(r["case"])
            x += (sets.index(r["isa"]) - (len(sets) - 1) / 2) * width
            share = 100 * r["bytes"] / best_ms(r) / 1e6 / r["copy_gb_per_s"]
            right.bar(x, share, width * 0.94, color=SETS[r["isa"], "fp32"])
    for isa in sets:
        right.bar(0, 0, color=SETS[isa, "fp32"], label=isa)
    right.axhline(100, color=RED, linewidth=1)
    right.set_xticks(range(len(labels)), labels)
    right.set_title("Decode, one thread: % of the copy bandwidth", fontsize=9)
    if sets:
        right.legend(
            fontsize=7, frameon=False, loc="upper center", ncols=3, bbox_to_anchor=(0.5, -0.16)
        )
    return figure


def gpu_cases(found):
    names = {r["case"] for r in found}
    return [n for n in NAMES if n in names] + sorted(names - set(NAMES))


def draw_gpu_times(pyplot, found):
    """Time over floor, one row a case; gates by colour, implementations by marker."""
    cases = gpu_cases(found)
    impls = sorted({r["impl"] for r in found}, key=ours_first)
    figure, axes = pyplot.subplots(figsize=(8.5, 1.5 + 0.24 * len(cases)))
    shifts = dict(zip(REGIME_COLOURS, (-0.22, 0, 0.22)))
    for r in found:
        own = impls.index(r["impl"])
        y = cases.index(r["case"]) + shifts[r["regime"]]
        colour = REGIME_COLOURS[r["regime"]]
        axes.plot(
            r["median_ms"] / r["floor_ms"],
            y,
            MARKERS[own % len(MARKERS)],
            color=colour,
            fillstyle="none" if own else "full",
            markersize=5,
        )
    for regime, colour in REGIME_COLOURS.items():
        axes.plot([], [], "s", color=colour, label=f"{regime} gates")
    for own, impl in enumerate(impls):
        fill = "none" if own else "full"
        axes.plot([], [], MARKERS[own % len(MARKERS)], color=INK, fillstyle=fill, label=impl)
    axes.axvline(1, color=RED, linewidth=1)
    axes.set_xscale("log")
    axes.set_yticks(range(len(cases)), cases)
    axes.invert_yaxis()
    axes.grid(axis="x", which="both", color="#e5e5e5", linewidth=0.6)
    axes.set_xlabel("time / floor (inputs, outputs and states moved once at copy bandwidth)")
    axes.legend(fontsize=8, frameon=False, loc="upper center", ncols=3, bbox_to_anchor=(0.5, -0.1))
    return figure


def draw_gpu_errors(pyplot, found):
    impls = sorted({r["impl"] for r in found}, key=ours_first)
    figure, grid = pyplot.subplots(1, 2, figsize=(8.5, 3.6), sharey=True)
    regimes = list(REGIME_COLOURS)
    for axes, field, title in zip(grid, ("error_out", "error_state"), ("out", "final state")):
        for own, impl in enumerate(impls):
            rows = [r for r in found if r["impl"] == impl and r[field]]
            x = [regimes.index(r["regime"]) + 0.22 * (own - (len(impls) - 1) / 2) for r in rows]
            fill = "none" if own else "full"
            marker = MARKERS[own % len(MARKERS)]
            y = [r[field] for r in rows]
            axes.plot(x, y, marker, color=INK, alpha=0.6, fillstyle=fill, label=impl)
        axes.set_yscale("log")
        axes.set_xticks(range(len(regimes)), [f"{regime} gates" for regime in regimes])
        axes.set_title(f"RMS error ratio to float64: {title}")
        axes.grid(axis="y", which="both", color="#e5e5e5", linewidth=0.6)
    grid[0].legend(fontsize=8, frameon=False)
    return figure
