"""The tables on top of docs/benchmarks.md: of each case the newest record, its floor or ceiling,
its goal, and what others took in the same case."""

import records
from gpu_names import NAMES
from report_cpu import DECODE_GOAL, PREFILL_GOALS, kernel_text, share_of_copy, share_of_fma
from report_decode import goal_of
from report_text import best_ms, is_users, milliseconds, percent, size_of, table

# ms: no slower than MoonshotAI's FlashKDA, as measured once on an H200, cold L2, any gates.
GOALS_MS = {
    "8192x96": 1.404,
    "mixed x96": 1.391,
    "8x1024x96": 1.193,
    "8192x64": 1.198,
    "mixed x64": 1.029,
    "8x1024x64": 0.813,
    "8192x32": 0.987,
    "8192x12": 0.857,
    "128x12": 0.041,
    "65536x12": 6.62,
}

TEXT = """\
## Summary

The newest record of each case; what was measured how, spreads, errors and every other case are
below. **floors** is the slowest of the three gate regimes as a multiple of the floor, the time to
move the data once. **others** is what another implementation took by its newest record, and how
many times our time that is.

"""

GPU_TEXT = """\
**{device}**, median of device time, ms. The goal is what MoonshotAI's FlashKDA was once measured to
take on an H200; it is no part of these runs.

"""

CPU_TEXT = """\
**{device}**, one thread, random gates, the fastest kernel set. Goals and ceilings:
[below](#goals-and-where-this-machine-stands).

"""


def others_text(ours, others):
    """Peers of one case and regime, beside our median."""
    return "<br>".join(
        f"{r['impl']}: {milliseconds(r['median_ms'])} ({r['median_ms'] / ours['median_ms']:.1f}x)"
        for r in others
    )


def gpu_rows(found):
    timed = [r for r in found if r["kind"] in ("prefill", "decode") and is_users(r)]
    cases = sorted(
        {(r["kind"], r["case"]) for r in timed},
        key=lambda c: (c[0] == "decode", NAMES.index(c[1]) if c[1] in NAMES else len(NAMES), c[1]),
    )
    for kind, case in cases:
        if kind == "prefill" and case not in GOALS_MS:
            continue
        own = [r for r in timed if (r["kind"], r["case"]) == (kind, case)]
        own.sort(key=lambda r: r["place"])
        ours = {r["regime"]: r for r in own if r["impl"].startswith("flash_kda")}
        if not ours:
            continue
        others = {}
        for r in own:
            if not r["impl"].startswith("flash_kda") and r["regime"] in ours:
                others.setdefault(r["regime"], {})[r["impl_name"]] = r
        regime = next((name for name in records.REGIMES if name in others), None)
        beside = others_text(ours[regime], others[regime].values()) if regime else "-"
        medians = [ours[n]["median_ms"] if n in ours else None for n in records.REGIMES]
        yield (
            f"{kind} {case}",
            milliseconds(next(iter(ours.values()))["floor_ms"]),
            GOALS_MS.get(case, "-") if kind == "prefill" else goal_of(case),
            *("-" if ms is None else f"**{milliseconds(ms)}**" for ms in medians),
            f"{max(r['median_ms'] / r['floor_ms'] for r in ours.values()):.1f}",
            f"{beside}, {regime} gates" if regime else beside,
        )


def cpu_rows(found):
    known = [r for r in found if (r["threads"], r["regime"]) == (1, "random")]
    kinds = [("prefill", "fp32"), ("prefill", "bf16"), ("decode", "fp32")]
    for kind, precision in kinds:
        same = [r for r in known if (r["kind"], r["precision"]) == (kind, precision)]
        for case in sorted({r["case"] for r in same}, key=size_of):
            ours = [r for r in same if r["case"] == case and r["isa"] != "torch"]
            if not ours:
                continue
            fastest = min(ours, key=best_ms)
            loop = [r for r in known if (r["case"], r["isa"]) == (case, "torch")]
            share, goal = share_of_copy(fastest), f"{DECODE_GOAL} % of copy"
            if kind == "prefill":
                share, goal = share_of_fma(fastest), f"{PREFILL_GOALS[precision]} % of FMA"
            beside = [f"{r['impl']}: {milliseconds(best_ms(r))}" for r in loop]
            yield (
                f"{kind} {case} {precision}",
                kernel_text(fastest),
                f"**{milliseconds(best_ms(fastest))}**",
                milliseconds(fastest["median_ms"]),
                percent(share),
                goal,
                "<br>".join(beside) or "-",
            )


def section(devices):
    """devices: [("gpu" or "cpu", name, its records)]"""
    text = TEXT
    for field, device, found in devices:
        if field == "gpu":
            head = ("case", "floor", "goal", *records.REGIMES, "floors", "others")
            rows = list(gpu_rows(found))
        else:
            head = ("case", "kernel", "best ms", "median ms", "of the ceiling", "goal", "others ms")
            rows = list(cpu_rows(found))
        if rows:
            introduction = GPU_TEXT if field == "gpu" else CPU_TEXT
            text += introduction.format(device=device) + table(head, rows) + "\n"
    return text
