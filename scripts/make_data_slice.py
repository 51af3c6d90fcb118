#!/usr/bin/env python3
"""Cuts the bundled sample out of the full activations and writes its data card.

    python3 scripts/make_data_slice.py FULL.safetensors [--layers 0,5] [--tokens 512]

Writes data/kda_trained_slice.safetensors and, from what is in it, data/README.md. Needs nothing
beyond the standard library. The first tokens of a layer are a sequence of their own (the operator
is causal), so the slice is as real as the whole. Running it again gives the same bytes.
"""

import argparse
import json
import math
import os
import struct
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SLICE = ROOT / "data" / "kda_trained_slice.safetensors"
CARD = ROOT / "data" / "README.md"
BYTES = {"BF16": 2, "F32": 4}
PER_TOKEN = ("q", "k", "v", "g", "beta")
PER_LAYER = ("A_log", "dt_bias")


def read_file(path):
    """Tensors as (dtype, shape, bytes), and the metadata."""
    blob = Path(path).read_bytes()
    (length,) = struct.unpack_from("<Q", blob)
    header = json.loads(blob[8 : 8 + length])
    metadata = header.pop("__metadata__", {})
    data = memoryview(blob)[8 + length :]
    tensors = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        tensors[name] = (entry["dtype"], entry["shape"], bytes(data[begin:end]))
    return tensors, metadata


def write_file(path, tensors, metadata):
    """Header padded so that the data starts at a multiple of 64; whole or not at all."""
    header, offset = {"__metadata__": metadata}, 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {
            "dtype": dtype,
            "shape": shape,
            "data_offsets": [offset, offset + len(data)],
        }
        offset += len(data)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % 64)
    temporary = path.with_suffix(".tmp")
    with open(temporary, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for _, _, data in tensors.values():
            file.write(data)
    os.replace(temporary, path)


def slice_layers(tensors, layers, tokens):
    """float32 tensors first, so that every tensor is aligned to its element."""
    chosen = {}
    for names in (PER_LAYER, PER_TOKEN):
        for layer in layers:
            for name in names:
                dtype, shape, data = tensors[f"layer{layer}.{name}"]
                if name in PER_TOKEN:
                    assert shape[0] == 1 and shape[1] >= tokens, (layer, name, shape)
                    shape = [1, tokens, *shape[2:]]
                    data = data[: BYTES[dtype] * math.prod(shape)]
                chosen[f"layer{layer}.{name}"] = (dtype, shape, data)
    return chosen


def floats(tensor):
    dtype, _, data = tensor
    if dtype == "F32":
        return struct.unpack(f"<{len(data) // 4}f", data)
    halves = struct.unpack(f"<{len(data) // 2}H", data)
    words = struct.pack(f"<{2 * len(halves)}H", *(x for h in halves for x in (0, h)))
    return struct.unpack(f"<{len(halves)}f", words)


def sigmoid(x):
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))


def quantile(ordered, p):
    at = p * (len(ordered) - 1)
    i = int(at)
    after = ordered[min(i + 1, len(ordered) - 1)]
    return ordered[i] + (at - i) * (after - ordered[i])


def log_decays(tensors, layer, lower_bound):
    """lower_bound sigmoid(exp(A_log) (g + dt_bias)), every token, head and channel, ascending."""
    shape = tensors[f"layer{layer}.g"][1]
    heads, channels = shape[2], shape[3]
    factor = [math.exp(a) for a in floats(tensors[f"layer{layer}.A_log"])]
    bias = floats(tensors[f"layer{layer}.dt_bias"])
    raw = floats(tensors[f"layer{layer}.g"])
    period = heads * channels
    return sorted(
        lower_bound * sigmoid(factor[i % period // channels] * (x + bias[i % period]))
        for i, x in enumerate(raw)
    )


def statistics_table(tensors, layers, lower_bound):
    lines = [
        "| layer | mean | 1 % | 10 % | median | 90 % | 99 % | beta mean | beta 99 % |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for layer in layers:
        decays = log_decays(tensors, layer, lower_bound)
        betas = sorted(sigmoid(x) for x in floats(tensors[f"layer{layer}.beta"]))
        cells = [sum(decays) / len(decays)]
        cells += [quantile(decays, p) for p in (0.01, 0.1, 0.5, 0.9, 0.99)]
        cells += [sum(betas) / len(betas), quantile(betas, 0.99)]
        lines.append(f"| {layer} | " + " | ".join(f"{x:.3g}" for x in cells) + " |")
    return "\n".join(lines)


def shapes_table(tensors):
    lines = ["| tensor | dtype | shape | bytes |", "|---|---|---|---|"]
    for name, (dtype, shape, data) in tensors.items():
        lines.append(f"| `{name}` | {dtype} | {shape} | {len(data):,} |")
    return "\n".join(lines)


CARD_TEXT = """# Data card: kda_trained_slice.safetensors

<!-- Written by scripts/make_data_slice.py from the file itself: change the script, not this. -->

## What it is
The inputs of Kimi Delta Attention in {count} layers ({layers}) of a trained model, the first
{tokens} tokens of one sequence, {size:,} bytes. `flashkda run` and `flashkda check` use it as their
first example, and tests use it because trained gates behave unlike random ones: most of their
channels hardly decay at all, so an error made early stays in the state until the end.

The model, as the file's metadata names it:

> {origin}

It predicts the next byte of a text; nothing of its weights, its text or its outputs is in the file.

## How it was made
`scripts/make_data_slice.py` takes the layers out of a recording of the operator's inputs, cuts
every per-token tensor after {tokens} tokens and changes no value: names, BF16 and F32 as recorded.
Metadata added: `scale` = {scale} (1 / sqrt(128)).

With the recording itself, more tokens and layers can be used: set the environment variable
`FLASH_KDA_DATA` to its path, and tests and scripts take it instead of the slice.

## Tensors
q, k, v, g and beta are what the operator receives: before normalisation, gate and sigmoid.
The gate is g = lower_bound x sigmoid(exp(A_log) x (g + dt_bias)) with lower_bound = {lower_bound}.

{shapes}

## Gates
Natural-log decay per token, head and key channel, and beta after its sigmoid:

{statistics}

A log-decay of -0.005 keeps half of the state for 140 tokens; one of -5 forgets it at once.

## Limits
One small model, one sequence, head size 128, equal numbers of key and value
heads, no initial state. It shows that a kernel is right and how fast it is on such gates; it says
nothing about the quality of a model, and statistics of larger models will differ.

## Licence
MIT, as the rest of this repository.
"""


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("full", help="the recording, a .safetensors file")
    parser.add_argument("--layers", default="0,5")
    parser.add_argument("--tokens", type=int, default=512)
    options = parser.parse_args()
    layers = [int(x) for x in options.layers.split(",")]
    tensors, metadata = read_file(options.full)
    metadata = {**metadata, "scale": repr(1 / math.sqrt(128))}
    chosen = slice_layers(tensors, layers, options.tokens)
    SLICE.parent.mkdir(exist_ok=True)
    write_file(SLICE, chosen, metadata)
    lower_bound = float(metadata["lower_bound"])
    CARD.write_text(
        CARD_TEXT.format(
            count=len(layers),
            layers=", ".join(f"`layer{n}`" for n in layers),
            tokens=options.tokens,
            size=SLICE.stat().st_size,
            origin=metadata["origin"],
            scale=metadata["scale"],
            lower_bound=metadata["lower_bound"],
            shapes=shapes_table(chosen),
            statistics=statistics_table(chosen, layers, lower_bound),
        )
    )
    print(f"{SLICE.relative_to(ROOT)}: {SLICE.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
