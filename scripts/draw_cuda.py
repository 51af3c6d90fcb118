#!/usr/bin/env python3
"""Draws the figures of docs/cuda.md: the data flow and the recurrence kernel's shared memory of
path sm80, the pairs of blocks of path sm90.

    python3 scripts/draw_cuda.py [--check]

Every size of path sm80 is read from src/cuda/tile_image.h. --check writes nothing and fails where
a figure in docs/img is another than the one that would be drawn.
"""

import argparse
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
HEADER = ROOT / "src" / "cuda" / "tile_image.h"
FOLDER = ROOT / "docs" / "img"

GLOBAL, SHARED, REGISTERS, WORK = "#dbe7f5", "#fbe3c0", "#d7ecd4", "#f4f4f4"
VALUES = "#f3c98b"  # v, in shared memory too
SENT = "#fdf3e1"  # in shared memory, brought by the other block
INK, PALE = "#24292f", "#6e7781"


def read_sizes(text):
    """The enumerators of the header that are plain numbers."""
    return {name: int(value) for name, value in re.findall(r"^ +([A-Z_]+) = (\d+)", text, re.M)}


class Drawing:
    """An SVG of a white page, as a list of elements."""

    def __init__(self, width, height, title):
        self.parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            f'width="{width}" height="{height}" font-family="Helvetica, Arial, sans-serif" '
            f'font-size="13" fill="{INK}">',
            f"<title>{title}</title>",
            '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
            'markerHeight="7" orient="auto">'
            f'<path d="M0 0L8 4L0 8z" fill="{INK}"/></marker></defs>',
            f'<rect width="{width}" height="{height}" fill="white"/>',
        ]

    def text(self, x, y, text, size=13, color=INK, anchor="middle", bold=False):
        weight = ' font-weight="bold"' if bold else ""
        text = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size}" fill="{color}" '
            f'text-anchor="{anchor}"{weight}>{text}</text>'
        )

    def box(self, x, y, width, height, lines, color, size=13, radius=4):
        """Lines of text in the middle; the first one is bold where there are several."""
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{radius}" '
            f'fill="{color}" stroke="{INK}"/>'
        )
        step = size + 4
        top = y + height / 2 - step * (len(lines) - 1) / 2 + size * 0.36
        for i, line in enumerate(lines):
            bold = i == 0 and len(lines) > 1
            self.text(x + width / 2, top + i * step, line, size, bold=bold)

    def arrow(self, *points, dashed=False):
        path = "M" + "L".join(f"{x:g} {y:g}" for x, y in points)
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        self.parts.append(
            f'<path d="{path}" fill="none" stroke="{INK}" stroke-width="1.4"{dash} '
            'marker-end="url(#tip)"/>'
        )

    def legend(self, x, y):
        for name, color in (
            ("global memory", GLOBAL),
            ("shared memory", SHARED),
            ("registers", REGISTERS),
        ):
            self.box(x, y, 16, 14, [], color, radius=2)
            self.text(x + 22, y + 12, name, color=PALE, anchor="start")
            x += 126

    def end(self):
        return "\n".join([*self.parts, "</svg>", ""])


def regions(size):
    """(operand, bytes) of an image, in the order in which they lie."""
    names = {"W": "W", "Q": "Qd", "K": "Kr", "L": "rest of Kr", "T": "T b", "P": "P", "D": "2^G_C"}
    starts = [size[f"IMAGE_{letter}"] for letter in names] + [size["IMAGE_BYTES"]]
    return [(name, starts[i + 1] - starts[i]) for i, name in enumerate(names.values())]


def draw_flow(size):
    d = Drawing(980, 640, "Data flow of the CUDA forward")
    tokens = size["TILE_TOKENS"]
    d.text(20, 30, f"1  prepare: every tile of {tokens} tokens and every value head at once", 15,
           anchor="start", bold=True)  # fmt: skip
    d.legend(592, 18)
    for i, (name, shape) in enumerate(
        (("q, k", "[B, T, H, 128]"), ("g", "[B, T, HV, 128]"), ("beta", "[B, T, HV]"))
    ):
        d.box(20, 52 + 58 * i, 130, 46, [name, shape], GLOBAL)
        d.arrow((150, 75 + 58 * i), (188, 75 + 58 * i))
    d.box(190, 52, 480, 162, [], WORK)
    steps = (
        ("norms", "1 / |q|, 1 / |k|"),
        ("G", "gate, summed"),
        ("Kd Qd Kr", "k^ 2^G, ..."),
        ("A, P", "pairs, tf32"),
        ("T b", "(I + A)^-1 b"),
        ("W", "-T b Kd"),
    )
    for i, (name, what) in enumerate(steps):
        x, y = 206 + 156 * (i % 3), 64 + 74 * (i // 3)
        d.box(x, y, 134, 46, [name, what], REGISTERS)
        if i % 3 < 2:
            d.arrow((x + 134, y + 23), (x + 154, y + 23))
    d.arrow((585, 110), (585, 124), (273, 124), (273, 136))
    d.text(430, 206, "one warp: what meets in a product is in the same lane already", 12, PALE)
    d.arrow((670, 133), (718, 133))
    d.box(720, 52, 240, 162, [], GLOBAL)
    d.text(840, 72, f"image: {size['IMAGE_BYTES']:,} bytes", bold=True)
    for i, (name, count) in enumerate(regions(size)):
        d.text(760, 94 + 16 * i, name, 12, anchor="start")
        d.text(920, 94 + 16 * i, f"{count:,}", 12, anchor="end")
    d.arrow((760, 214), (760, 240), (713, 240), (713, 266))

    d.text(20, 250, "2  recurrence: a chain of tiles for each sequence and value head", 15,
           anchor="start", bold=True)  # fmt: skip
    d.text(770, 236, f"cp.async, {size['STAGES'] - 1} tiles ahead", 12, PALE, anchor="start")
    d.box(20, 268, 150, 46, ["initial_state", "[N, HV, V, 128]"], GLOBAL)
    d.box(810, 268, 150, 46, ["final_state", "[N, HV, V, 128]"], GLOBAL)
    tiles = ("tile 0", "tile 1", "...", "last tile")
    x = 210
    d.arrow((170, 291), (x - 2, 291))
    for name in tiles:
        d.box(x, 268, 118, 46, [name], WORK)
        d.arrow((x + 118, 291), (x + 146, 291))
        x += 148
    d.text(338, 262, "S", 12, PALE)
    d.text(486, 262, "S", 12, PALE)
    draw_tile(d, 350)
    return d.end()


def draw_tile(d, top):
    """What one warp does with one tile, from `top` down."""
    d.parts.append(
        f'<path d="M358 314L20 {top}M476 314L960 {top}" stroke="{PALE}" stroke-dasharray="2 4"/>'
    )
    d.box(20, top, 940, 270, [], "white")
    what = "one warp, one tile: 16 value channels as rows, tokens as columns"
    d.text(34, top + 20, what, 12, PALE, anchor="start")
    d.box(40, top + 40, 120, 44, ["v", "bf16, times f"], SHARED)
    d.box(34, top + 140, 126, 60, ["S f", "fp32 accumulators,", "fp16 for products"], REGISTERS, 11)
    d.box(430, top + 60, 120, 50, ["U'", "16 x 16"], REGISTERS)
    d.box(690, top + 110, 120, 50, ["O'", "16 x 16"], REGISTERS)
    d.box(690, top + 200, 120, 50, ["S f", "of the next tile"], REGISTERS)
    d.box(850, top + 112, 96, 46, ["out", "scale / f"], GLOBAL)

    def times(x, y, name):
        d.box(x, top + y, 96, 30, ["x " + name], SHARED, radius=15)

    times(250, 47, "(T b)'")
    times(250, 97, "W'")
    times(250, 155, "Qd'")
    times(250, 210, "2^G_C")
    times(580, 70, "P'")
    times(564, 162, "Kr, its rest")
    d.arrow((160, top + 62), (248, top + 62))
    d.arrow((346, top + 62), (400, top + 62), (428, top + 78))
    for y in (112, 170, 225):
        d.arrow((160, top + 170), (205, top + 170), (205, top + y), (248, top + y))
    d.arrow((346, top + 112), (400, top + 112), (428, top + 94))
    d.arrow((346, top + 170), (450, top + 170), (500, top + 135), (688, top + 135))
    d.arrow((346, top + 225), (688, top + 225))
    d.arrow((550, top + 85), (578, top + 85))
    d.arrow((676, top + 85), (710, top + 85), (740, top + 108))
    d.arrow((520, top + 110), (520, top + 177), (562, top + 177))
    d.arrow((660, top + 177), (672, top + 177), (700, top + 198))
    d.arrow((810, top + 135), (848, top + 135))


def draw_memory(size):
    stages, image, values = size["STAGES"], size["IMAGE_BYTES"], size["VALUE_BYTES"]
    d = Drawing(980, 390, "Shared memory of a recurrence block")
    d.text(20, 30, "Shared memory of a block of the recurrence (2 warps drawn)", 15, anchor="start",
           bold=True)  # fmt: skip
    left, width, warps = 110, 840, 2
    scale = width / (image + warps * values)
    for stage in range(stages):
        y, x = 66 + 54 * stage, left
        d.text(20, y + 26, f"stage {stage}", anchor="start", bold=True)
        parts = [*regions(size), *((f"v {w}", values) for w in range(warps))]
        for i, (name, count) in enumerate(parts):
            lines = [name, f"{count:,}"] if count > 1000 else []
            color = VALUES if name.startswith("v ") else SHARED
            d.box(x, y, count * scale, 42, lines, color, 12, radius=0)
            if not lines and stage == 0:
                d.text(x + count * scale / 2, y - 5 - 13 * (i % 2), name, 11, PALE)
            x += count * scale
    below = 66 + 54 * stages + 18
    lines = (
        f"A stage is an image, {image:,} bytes, which all warps read, and behind it {values} bytes "
        "of v for each warp.",
        f"While tile i is read, cp.async brings tile i + {stages - 1} into the stage that tile "
        "i - 1 has left; one barrier a tile.",
        "Operands lie as fragments: 16 bytes a lane bring four registers, and no bank is met "
        "twice.",
    )
    for i, line in enumerate(lines):
        d.text(20, below + 20 * i, line, anchor="start")
    sizes = ", ".join(
        f"{warps}: {stages * (image + warps * values):,}" for warps in (1, 2, 4, 8)
    )
    d.text(20, below + 20 * len(lines), f"Bytes of a block by its warps: {sizes}.", anchor="start")
    return d.end()


def draw_pairs(_size):
    d = Drawing(980, 420, "Two blocks of a cluster share the preparation of chunks")
    d.text(20, 30, "pairs: a chunk is prepared by one block and walked by both", 15, anchor="start",
           bold=True)  # fmt: skip
    d.legend(592, 18)
    places = range(4)
    for block, top in ((0, 52), (1, 240)):
        chunks, channels = (("0, 2, 4, ...", "0 .. 63"), ("1, 3, 5, ...", "64 .. 127"))[block]
        d.box(180, top, 620, 140, [], WORK)
        d.text(192, top + 20, f"block {block}", anchor="start", bold=True)
        d.box(20, top + 30, 130, 80, ["q, k, g, b", f"chunks {chunks}"], GLOBAL)
        d.arrow((150, top + 70), (196, top + 70))
        d.box(198, top + 30, 150, 80, ["prepare warps", "factors, A, P, T b"], REGISTERS)
        d.arrow((348, top + 70), (398, top + 70))
        for place in places:
            own = place % 2 == block
            lines = [str(place), "made" if own else "sent"]
            d.box(400 + 48 * place, top + 38, 44, 64, lines, SHARED if own else SENT)
        d.text(610, top + 128, "places for chunks", 12, PALE, anchor="start")
        d.arrow((590, top + 70), (628, top + 70))
        d.box(630, top + 30, 150, 80, ["state warps", "S in accumulators"], REGISTERS)
        d.arrow((780, top + 70), (828, top + 70))
        d.box(830, top + 30, 130, 80, ["rows of out", f"channels {channels}"], GLOBAL)
    for place in places:
        x, ends = 422 + 48 * place, (154, 276)
        d.arrow(*((x, y) for y in (ends if place % 2 == 0 else ends[::-1])), dashed=True)
    d.text(610, 220, "bulk copies from shared to shared memory, 37 KB a chunk", 12, PALE,
           anchor="start")  # fmt: skip
    d.text(20, 406, "Of a later segment each block walks all channels: block 0 from a zero state "
           "(FORCED), block 1 from the identity (RESPONSE).", 12, PALE, anchor="start")  # fmt: skip
    return d.end()


FIGURES = {
    "cuda-data-flow.svg": draw_flow,
    "cuda-shared-memory.svg": draw_memory,
    "cuda-pairs.svg": draw_pairs,
}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--folder", type=Path, default=FOLDER)
    options = parser.parse_args()
    size = read_sizes(HEADER.read_text())
    for name, draw in FIGURES.items():
        path, text = options.folder / name, draw(size)
        if not options.check:
            path.write_text(text)
        elif not path.exists() or path.read_text() != text:
            sys.exit(f"{path} is not what {HEADER.name} says: run scripts/draw_cuda.py")


if __name__ == "__main__":
    main()
