"""The GPU part of docs/benchmarks.md."""

import math

import records
import report_decode
import report_pictures
from gpu_names import NAMES, TEN_SHAPES
from report_text import Runs, is_users, milliseconds, ours_first, percent, scientific, slug, table

EXPLANATION = """\
Device events around the call as a user makes it, the L2 flushed (256 MB written) before each call;
states enter and leave in fp32, the initial one 0.1 normal.

* **floor** is the time to move q, k, v, g, out, beta and the states once at the copy bandwidth that
  the same run measured.
* **noise** is how far the median of the same call, timed once more, was from the first.
* **allocating** is the call without a workspace of the caller's.
* Errors are of three heads and the first 2048 tokens of the same inputs, in a call of its own; its
  kernel is named where it is another than the timed one.
* This package chooses between its kernels; in a row that says `path` they were named.
* Other implementations are measured in the same run where they are installed, else left out.
"""


def order_of(name):
    return NAMES.index(name) if name in NAMES else len(NAMES)


def times(found, regime, runs):
    rows = []
    chosen = [r for r in found if r["kind"] == "prefill" and r["regime"] == regime]
    chosen.sort(key=lambda r: (order_of(r["case"]), r["case"], ours_first(r["impl"])))
    for r in chosen:
        again = r["again_ms"]
        noise = abs(again - r["median_ms"]) / r["median_ms"] if again else None
        kernel = f"`{r['kernel']}`"
        if r.get("error_kernel") not in (None, r["kernel"]):
            kernel += f" (error: `{r['error_kernel']}`)"
        rows.append(
            (
                r["case"],
                r["impl"] if is_users(r) else f"{r['impl']}, path {r['path']}",
                milliseconds(r["floor_ms"]),
                f"**{milliseconds(r['median_ms'])}**",
                f"{milliseconds(r['p10_ms'])} to {milliseconds(r['p90_ms'])}",
                f"{r['median_ms'] / r['floor_ms']:.1f}",
                percent(noise),
                milliseconds(r.get("no_workspace_ms")),
                f"{scientific(r['error_out'])} / {scientific(r['error_state'])}",
                kernel,
                runs[r],
            )
        )
    head = ("case", "what", "floor ms", "median ms", "p10 to p90", "floors", "noise")
    return table((*head, "allocating", "error out / state", "kernel", "run"), rows)


def ten_shapes(found):
    """Geometric means, of implementations that have all ten; the newest record of each."""
    rows = []
    found = [r for r in found if r["kind"] == "prefill" and is_users(r)]
    found.sort(key=lambda r: r["place"])
    for impl in sorted({r["impl_name"] for r in found}, key=ours_first):
        for regime in records.REGIMES:
            own = [r for r in found if (r["impl_name"], r["regime"]) == (impl, regime)]
            ms = {r["case"]: (r["median_ms"], r["floor_ms"]) for r in own}
            if set(TEN_SHAPES) <= set(ms):
                mean, floor = (
                    math.exp(sum(math.log(ms[case][i]) for case in TEN_SHAPES) / len(TEN_SHAPES))
                    for i in (0, 1)
                )
                rows.append((impl, regime, milliseconds(floor), milliseconds(mean)))
    head = ("what", "gates", "floor, ms", "geometric mean, ms")
    return table(head, rows) if rows else "Not all ten are recorded.\n"


def host(found, runs):
    rows = []
    names = ("median_ms", "no_workspace_ms", "c_ms", "launch_ms")
    for r in (r for r in found if r["kind"] == "overhead"):
        figures = ("-" if r.get(name) is None else f"{1e3 * r[name]:.2f}" for name in names)
        impl = r["impl"] if is_users(r) else f"{r['impl']}, path {r['path']}"
        rows.append((r["case"], impl, f"`{r['kernel']}`", *figures, runs[r]))
    head = ("case", "what", "kernel", "Python call, us", "allocating, us", "C call, us")
    head += ("one empty kernel, us", "run")
    return table(head, rows) if rows else "No records.\n"


def section(gpu, found):
    runs = Runs(found)
    prefill = [r for r in found if r["kind"] == "prefill" and is_users(r)]
    prefix = f"img/gpu-{slug(gpu)}"
    pictures = {
        f"{prefix}-times.png": (report_pictures.draw_gpu_times, prefill),
        f"{prefix}-errors.png": (report_pictures.draw_gpu_errors, prefill),
    }
    names = list(pictures)
    copies = [r["copy_gb_per_s"] for r in found]
    text = f"""## GPU: {gpu}

{EXPLANATION}
Copy bandwidth: {min(copies):.0f} to {max(copies):.0f} GB/s over the runs, bytes read plus written.

![Times beside the floor]({names[0]})

![Errors against float64]({names[1]})

"""
    for regime in records.REGIMES:
        if any(r["regime"] == regime for r in prefill):
            text += f"### Prefill, {regime} gates\n\n{times(found, regime, runs)}\n"
    decode = [r for r in found if r["kind"] == "decode"]
    if decode:
        pictures[f"{prefix}-decode.png"] = (report_decode.draw, decode)
        text += f"### Decode\n\n![Share of the copy bandwidth]({prefix}-decode.png)\n\n"
        text += report_decode.decode(found) + "\n"
    text += f"""### Ten shapes with few heads

{ten_shapes(found)}
### What a call costs the host

Many calls in a row on an idle device, until they return: the caller's time, not the device's.

{host(found, runs)}
### Runs

{runs.text()}
"""
    return text, pictures
