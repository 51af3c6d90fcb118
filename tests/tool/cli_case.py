"""What the tests of the program share: files written and read by hand, the operator in plain
Python, and a test case that calls the program.

    python3 tests/tool/test_cli_run.py --program build/release/tools/flashkda/flashkda [-v] [TEST]

Needs the standard library alone.
"""

import argparse
import json
import math
import os
import random
import struct
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SLICE = ROOT / "data" / "kda_trained_slice.safetensors"
D = 128
SIZES = {"I64": 8, "F32": 4, "I32": 4, "BF16": 2, "F16": 2, "U8": 1}
DEFAULT_METADATA = {"lower_bound": "-5.0"}

OK, CHECK_FAILED, USAGE, INPUT, LIBRARY, OUTPUT = range(6)


def bf16_bytes(values):
    """Rounded to nearest even, as bytes."""
    halves = []
    for value in values:
        (bits,) = struct.unpack("<I", struct.pack("<f", value))
        halves.append((bits + 0x7FFF + (bits >> 16 & 1)) >> 16 if value == value else 0x7FC0)
    return struct.pack(f"<{len(halves)}H", *halves)


def bf16_values(data):
    halves = struct.unpack(f"<{len(data) // 2}H", data)
    return [struct.unpack("<f", struct.pack("<I", half << 16))[0] for half in halves]


def f32_bytes(values):
    return struct.pack(f"<{len(values)}f", *values)


def write_file(path, tensors, metadata=None):
    """tensors: name -> (dtype, shape, bytes). Large elements first: then all are aligned."""
    tensors = dict(sorted(tensors.items(), key=lambda item: -SIZES[item[1][0]]))
    header, offset = {}, 0
    if metadata is not None:
        header["__metadata__"] = metadata
    for name, (dtype, shape, data) in tensors.items():
        end = offset + len(data)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    Path(path).write_bytes(
        struct.pack("<Q", len(text)) + text + b"".join(data for _, _, data in tensors.values())
    )


def read_file(path):
    blob = Path(path).read_bytes()
    (length,) = struct.unpack_from("<Q", blob)
    header = json.loads(blob[8 : 8 + length])
    metadata = header.pop("__metadata__", {})
    data = blob[8 + length :]
    return {
        name: (x["dtype"], x["shape"], data[x["data_offsets"][0] : x["data_offsets"][1]])
        for name, x in header.items()
    }, metadata


def make_layer(prefix="", T=20, H=1, HV=None, B=1, seed=0, extra=(), parameters=True):
    """Random inputs; `extra` more tensors."""
    HV = HV or H
    draw = random.Random(seed)

    def normal(*shape):
        return shape, [draw.gauss(0, 1) for _ in range(math.prod(shape))]

    tensors = {}
    if parameters:
        shape, values = normal(HV)
        tensors["A_log"] = ("F32", list(shape), f32_bytes(values))
        shape, values = normal(HV, D)
        tensors["dt_bias"] = ("F32", list(shape), f32_bytes(values))
    tensors.update(extra)
    for name, heads in (("q", H), ("k", H), ("v", HV), ("g", HV)):
        shape, values = normal(B, T, heads, D)
        tensors[name] = ("BF16", list(shape), bf16_bytes(values))
    shape, values = normal(B, T, HV)
    tensors["beta"] = ("BF16", list(shape), bf16_bytes(values))
    return {prefix + name: tensor for name, tensor in tensors.items()}


def recurrence(tensors, lower_bound, scale):
    """The operator in plain Python for one sequence and H = HV: a second statement of it."""
    _, (_, T, H, _), _ = tensors["q"]
    q, k, v, g = (bf16_values(tensors[name][2]) for name in "qkvg")
    beta = bf16_values(tensors["beta"][2])
    A_log = struct.unpack(f"<{H}f", tensors["A_log"][2])
    dt_bias = struct.unpack(f"<{H * D}f", tensors["dt_bias"][2])
    out, states = [0.0] * (T * H * D), []
    for h in range(H):
        S = [[0.0] * D for _ in range(D)]
        for t in range(T):
            at = (t * H + h) * D
            row_q, row_k = q[at : at + D], k[at : at + D]
            norm_q = 1 / math.sqrt(sum(x * x for x in row_q) + 1e-6)
            norm_k = 1 / math.sqrt(sum(x * x for x in row_k) + 1e-6)
            row_q, row_k = [x * norm_q for x in row_q], [x * norm_k for x in row_k]
            b = 1 / (1 + math.exp(-beta[t * H + h]))
            gate = [math.exp(A_log[h]) * (g[at + c] + dt_bias[h * D + c]) for c in range(D)]
            decay = [math.exp(lower_bound / (1 + math.exp(-x))) for x in gate]
            for i in range(D):
                row = [x * y for x, y in zip(S[i], decay)]
                u = b * (v[at + i] - sum(x * y for x, y in zip(row, row_k)))
                S[i] = [x + u * y for x, y in zip(row, row_k)]
                out[at + i] = scale * sum(x * y for x, y in zip(S[i], row_q))
        states += [x for row in S for x in row]
    return out, states


def ratio(got, wanted):
    error = sum((x - y) ** 2 for x, y in zip(got, wanted))
    return math.sqrt(error / sum(y * y for y in wanted))


class Case(unittest.TestCase):
    program = "flashkda"  # set by main

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
        self.input = self.folder / "in.safetensors"
        self.output = self.folder / "out.safetensors"

    def call(self, *arguments, env=None, code=OK, **options):
        """Runs the program; the exit code must be `code`. Returns stdout and stderr."""
        environment = {k: v for k, v in os.environ.items() if not k.startswith("FLASH_KDA_")}
        environment.update(env or {})
        done = subprocess.run(
            [self.program, *map(str, arguments)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            env=environment,
            timeout=120,
            **options,
        )
        text = done.stdout.decode(), done.stderr.decode()
        self.assertEqual(done.returncode, code, text)
        if code not in (OK, CHECK_FAILED):
            self.assertIn("flashkda", text[1])
            self.assertEqual(text[1].count("\n"), 1, text[1])
            self.assertEqual(text[0], "")
        return text

    def refuse(self, code, wanted, *arguments, **options):
        """An error with this text, and no file but those that were there."""
        before = {p: p.read_bytes() for p in self.folder.iterdir() if p.is_file()}
        _, stderr = self.call(*arguments, code=code, **options)
        self.assertIn(wanted, stderr)
        after = {p: p.read_bytes() for p in self.folder.iterdir() if p.is_file()}
        self.assertEqual(sorted(before), sorted(after))
        self.assertEqual(before, after)

    def refuse_run(self, code, wanted, *arguments, **options):
        self.refuse(code, wanted, "run", self.input, "-o", self.output, *arguments, **options)

    def run_bytes(self, *arguments, **options):
        self.call("run", self.input, "-o", self.output, *arguments, **options)
        return self.output.read_bytes()

    def usable_isas(self):
        return json.loads(self.call("info", "--json")[0])["cpu_usable"]


SLOWLY = ["--isa", "portable", "--threads", "1"]


def make_long_layer(T=16384, H=2):
    """A layer that takes the portable kernels a while; made of repeated rows, so cheap to write."""
    short = make_layer(T=16, H=H)
    for name in ("q", "k", "v", "g", "beta"):
        dtype, shape, data = short[name]
        short[name] = (dtype, [1, T, *shape[2:]], data * (T // 16))
    return short


def main():
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--program", required=True)
    options, rest = parser.parse_known_args()
    Case.program = options.program
    unittest.main(module="__main__", argv=[sys.argv[0], *rest])
