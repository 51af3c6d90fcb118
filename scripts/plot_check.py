#!/usr/bin/env python3
"""A picture of `flashkda check --json`: the error of each layer beside its bound, and its decays.

    flashkda check --json IN.safetensors | python3 scripts/plot_check.py [-o PICTURE.png]
    python3 scripts/plot_check.py RESULT.json [-o PICTURE.png] [--quiet]

The picture is always printed as text; with -o it is also drawn as a PNG, which needs matplotlib.
Without matplotlib that is said, and the exit code stays 0.
"""

import argparse
import json
import math
import os
import sys

BAR = 40
UNICODE = " ▁▂▃▄▅▆▇█"
ASCII = " .:-=+*#@"
OUT_COLOUR, STATE_COLOUR, DECAY_COLOUR, BOUND_COLOUR = "#6b9fd1", "#a9cbe8", "#c77d3a", "#b03a2e"


def layer_name(layer):
    name = layer["prefix"].rstrip(".") or "unnamed"
    return "".join(c if c.isprintable() else "?" for c in name)


def ratio_of(error):
    """check writes null for what is not finite."""
    return math.inf if error["ratio"] is None else error["ratio"]


def error_lines(layers, width, full):
    yield f"Error against float64, {full} = the bound"
    for layer in layers:
        for name, key in (("out", "out"), ("state", "state")):
            ratio, bound = ratio_of(layer[key]), layer[key]["bound"]
            share = ratio / bound
            filled = BAR if share > 1 else round(share * BAR)
            bar = full * filled + "." * (BAR - filled)
            verdict = "ok" if share <= 1 else "PAST ITS BOUND"
            label = layer_name(layer) if key == "out" else ""
            yield (
                f"  {label:<{width}} {name:<5} {ratio:8.2e} |{bar}| {share:4.0%} of {bound:.2e}"
                f"  {verdict}"
            )


def decay_axis(histogram):
    """The edges of the bins as -g, and the columns where it passes a power of ten."""
    first, step = histogram["log10_first"], histogram["log10_step"]
    marks = {}
    for i in range(len(histogram["counts"])):
        power = first + i * step
        if abs(power - round(power)) < 1e-9:
            marks[i] = round(power)
    return marks


def decay_lines(layers, width, ramp):
    yield "Decay of the state per token, -g: how many channels, from slow (left) to fast"
    marks = decay_axis(layers[0]["decay"]["histogram"])
    axis = ""
    for i, power in marks.items():
        axis = axis.ljust(2 * i) + f"1e{power}"
    for layer in layers:
        counts = layer["decay"]["histogram"]["counts"]
        top = max(counts) or 1
        columns = "".join(2 * ramp[math.ceil(c / top * (len(ramp) - 1))] for c in counts)
        yield f"  {layer_name(layer):<{width}} |{columns}|  median {layer['decay']['p50']:.2g}"
    yield f"  {'':<{width}}  {axis}"


def text_picture(result, unicode):
    layers = result["layers"]
    width = max(len(layer_name(layer)) for layer in layers)
    ramp = UNICODE if unicode else ASCII
    return "\n".join(
        [
            *error_lines(layers, width, "█" if unicode else "#"),
            "",
            *decay_lines(layers, width, ramp),
        ]
    )


def draw_errors(axes, layer, last):
    for row, (key, colour) in enumerate((("out", OUT_COLOUR), ("state", STATE_COLOUR))):
        ratio, bound = ratio_of(layer[key]), layer[key]["bound"]
        share = ratio / bound
        axes.barh(-row, min(share, 1.25), color=colour if share <= 1 else BOUND_COLOUR, height=0.7)
        axes.text(0.01, -row, f"{key}  {ratio:.2e}", va="center", color="black", fontsize=8)
    axes.axvline(1, color=BOUND_COLOUR, linewidth=1.2)
    axes.set_xlim(0, 1.25)
    axes.set_ylim(-1.6, 0.6)
    axes.set_yticks([])
    axes.set_ylabel(layer_name(layer), rotation=0, ha="right", va="center")
    if last:
        axes.set_xlabel("RMS error against float64, as a share of its bound")
    else:
        axes.set_xticklabels([])


def draw_decays(axes, layer, last):
    histogram = layer["decay"]["histogram"]
    first, step, counts = histogram["log10_first"], histogram["log10_step"], histogram["counts"]
    total = sum(counts) or 1
    edges = [10 ** (first + i * step) for i in range(len(counts) + 1)]
    axes.stairs([c / total for c in counts], edges, fill=True, color=DECAY_COLOUR, alpha=0.8)
    axes.axvline(max(-layer["decay"]["p50"], edges[0]), color="black", linewidth=1, linestyle="--")
    axes.set_xscale("log")
    axes.set_xlim(edges[0], edges[-1])
    axes.set_yticks([])
    if last:
        axes.set_xlabel("decay per token, -g (dashed: median; outer bins: what lies beyond)")
    else:
        axes.set_xticklabels([])


def draw_picture(result, path):
    """False where matplotlib is missing."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    layers = result["layers"]
    figure, grid = pyplot.subplots(
        len(layers), 2, figsize=(11, 1.3 + 0.9 * len(layers)), squeeze=False
    )
    for i, layer in enumerate(layers):
        last = i == len(layers) - 1
        draw_errors(grid[i][0], layer, last)
        draw_decays(grid[i][1], layer, last)
    for axes in grid.flat:
        axes.spines[["top", "right", "left"]].set_visible(False)
    kernels = ", ".join(sorted({layer["kernel"] for layer in layers}))
    tokens = sum(layer["tokens"] for layer in layers)
    verdict = "every layer within its bounds" if result["passed"] else "a layer is past its bound"
    figure.suptitle(f"flash_kda {result['version']}, {kernels}, {tokens} tokens: {verdict}")
    figure.tight_layout()
    temporary = f"{path}.tmp"
    figure.savefig(temporary, dpi=140, format="png")
    os.replace(temporary, path)
    return True


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("result", nargs="?", help="output of flashkda check --json; else stdin")
    parser.add_argument("-o", "--output", help="where the PNG goes")
    parser.add_argument("-q", "--quiet", action="store_true", help="no text picture")
    options = parser.parse_args()
    try:
        if options.result:
            with open(options.result, encoding="utf-8") as file:
                result = json.load(file)
        else:
            result = json.load(sys.stdin)
        layers = result["layers"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        sys.exit(f"plot_check.py: not an output of flashkda check --json: {error}")
    if not layers:
        sys.exit("plot_check.py: no layer to show")
    if not options.quiet:
        print(text_picture(result, "utf" in (sys.stdout.encoding or "").lower()))
    if options.output:
        if draw_picture(result, options.output):
            print(f"picture: {options.output}")
        else:
            print("no PNG: matplotlib is not installed", file=sys.stderr)


if __name__ == "__main__":
    main()
