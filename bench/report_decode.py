"""Decode on a GPU: the table, the goals and the picture of docs/benchmarks.md."""

from gpu_names import DECODE_NAMES
from report_text import Runs, milliseconds, ours_first, scientific, table

# ms, the L2 cold; the last two in a CUDA graph.
GOALS_MS = {
    "N256xH32 fp32": 0.275,
    "N256xH96 fp32": 0.82,
    "N128xH32 fp32": 0.14,
    "N32xH32 fp32": 0.040,
}
GRAPH_GOALS_MS = {"N1xH32 fp32": 0.006, "N1xH96 fp32": 0.008}

EXPLANATION = """\
States are updated in place. **TB/s** is what must move (the states read once and written once, with
draft tokens written after each of them, and the tokens) over the median; **of copy** the share of
the copy bandwidth of the same run. **in a graph** is the time of a call in a CUDA graph of calls on
states of their own, more than the L2 holds; **host** the time until an eager call returns.
"""


def order_of(record):
    case = record["case"]
    at = DECODE_NAMES.index(case) if case in DECODE_NAMES else len(DECODE_NAMES)
    return at, case, record["regime"], ours_first(record["impl"])


def microseconds(value):
    return "-" if value is None else f"{1e3 * value:.1f}"


def goal_of(case):
    if case in GRAPH_GOALS_MS:
        return f"{microseconds(GRAPH_GOALS_MS[case])} us in a graph"
    return milliseconds(GOALS_MS[case]) if case in GOALS_MS else "-"


def decode(found):
    rows, runs = [], Runs(found)
    for r in sorted((r for r in found if r["kind"] == "decode"), key=order_of):
        rows.append(
            (
                r["case"],
                r["regime"],
                r["impl"],
                milliseconds(r["floor_ms"]),
                goal_of(r["case"]) if r["impl"].startswith("flash_kda") else "-",
                f"**{milliseconds(r['median_ms'])}**",
                f"{milliseconds(r['p10_ms'])} to {milliseconds(r['p90_ms'])}",
                f"{r['bytes'] / r['median_ms'] / 1e9:.2f}",
                f"{100 * r['floor_ms'] / r['median_ms']:.0f} %",
                microseconds(r.get("graph_ms")),
                microseconds(r.get("host_ms")),
                f"{scientific(r['error_out'])} / {scientific(r['error_state'])}",
                f"`{r['kernel']}`",
                runs[r],
            )
        )
    head = ("case", "gates", "what", "floor ms", "goal", "median ms", "p10 to p90", "TB/s")
    head += ("of copy", "in a graph, us", "host, us", "error out / state", "kernel", "run")
    return EXPLANATION + "\n" + table(head, rows) if rows else "No records.\n"


def draw(pyplot, found):
    """Share of the copy bandwidth of the large cases, implementations side by side."""
    own = [r for r in found if r["kind"] == "decode" and r["regime"] == "random"]
    own = [r for r in own if not r["case"].startswith("N1x")]
    cases = [name for name in DECODE_NAMES if any(r["case"] == name for r in own)]
    impls = sorted({r["impl"] for r in own}, key=ours_first)
    figure, axes = pyplot.subplots(figsize=(8.5, 1.4 + 0.4 * len(cases)))
    width = 0.8 / max(len(impls), 1)
    for i, impl in enumerate(impls):
        rows = [r for r in own if r["impl"] == impl and r["case"] in cases]
        y = [cases.index(r["case"]) + (i - (len(impls) - 1) / 2) * width for r in rows]
        share = [100 * r["floor_ms"] / r["median_ms"] for r in rows]
        colour = ("#2f6db0", "#9aa5b1", "#e0a458")[i % 3]
        axes.barh(y, share, width * 0.94, color=colour, label=impl)
        for at, value, r in zip(y, share, rows):
            text = f" {milliseconds(r['median_ms'])} ms"
            axes.text(value, at, text, va="center", fontsize=7.5, color="#333333")
    axes.axvline(100, color="#b03a2e", linewidth=1)
    axes.set_yticks(range(len(cases)), cases)
    axes.invert_yaxis()
    axes.set_xlabel("decode, random gates: % of the bandwidth that a copy reaches in the same run")
    if impls:
        axes.legend(
            fontsize=8, frameon=False, loc="upper center", ncols=2, bbox_to_anchor=(0.5, -0.2)
        )
    axes.margins(x=0.12)
    return figure
