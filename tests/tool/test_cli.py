#!/usr/bin/env python3
"""The program `flashkda` from outside: options, files, errors, exit codes, progress.

    python3 tests/tool/test_cli.py --program build/release/tools/flashkda/flashkda [-v] [TEST]

Needs the standard library alone. FLASH_KDA_DATA may name the full recording (data/README.md).
"""

import argparse
import json
import math
import os
import pty
import random
import resource
import signal
import struct
import subprocess
import sys
import tempfile
import time
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SLICE = ROOT / "data" / "kda_trained_slice.safetensors"
PROGRAM = "flashkda"  # set by main
D = 128
SIZES = {"I64": 8, "F32": 4, "I32": 4, "BF16": 2, "F16": 2, "U8": 1}

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


DEFAULT_METADATA = {"lower_bound": "-5.0"}


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
            [PROGRAM, *map(str, arguments)],
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


class Usage(Case):
    def test_help(self):
        for arguments in (["--help"], ["-h"], ["help"]):
            stdout, stderr = self.call(*arguments)
            self.assertIn("flashkda check", stdout)
            self.assertIn("Exit codes", stdout)
            self.assertEqual(stderr, "")
        for command in ("run", "check", "info", "bench"):
            stdout, stderr = self.call(command, "--help")
            self.assertTrue(stdout.startswith(f"flashkda {command}"))
            self.assertEqual(stderr, "")

    def test_help_names_every_option(self):
        documented = {
            "run": ["--output", "--prefix", "--scale", "--lower-bound", "--device", "--isa"]
            + ["--precision", "--threads", "--piece-tokens", "--json", "--quiet"],
            "check": ["--prefix", "--scale", "--lower-bound", "--device", "--isa", "--precision"]
            + ["--threads", "--piece-tokens", "--json", "--quiet"],
            "info": ["--json"],
            "bench": ["--isa", "--threads", "--case", "--regime", "--input", "--quick", "--json"]
            + ["--commit", "--device", "--quiet"],
        }
        for command, options in documented.items():
            text = self.call(command, "--help")[0]
            for option in options:
                self.assertIn(option, text)

    def test_version(self):
        stdout, _ = self.call("--version")
        header = (ROOT / "include" / "flash_kda.h").read_text()
        version = header.split('FKDA_VERSION_STRING "')[1].split('"')[0]
        self.assertEqual(stdout, f"flashkda {version}\n")

    def test_no_command(self):
        done = subprocess.run([PROGRAM], capture_output=True, timeout=20)
        self.assertEqual(done.returncode, USAGE)
        self.assertEqual(done.stdout, b"")
        self.assertIn(b"flashkda run", done.stderr)

    def test_unknown(self):
        self.refuse(USAGE, "'rum' is not a command", "rum")
        self.refuse(USAGE, "'--colour': no such option", "run", "--colour", "x")
        self.refuse(USAGE, "'-z': no such option", "run", "-z")
        self.refuse(USAGE, "--quick: not an option of this command", "run", "x", "--quick")
        self.refuse(USAGE, "--output: not an option of this command", "info", "-o", "x")
        self.refuse(USAGE, "needs a value", "run", "x", "-o")
        self.refuse(USAGE, "one argument too many", "run", "x", "y", "-o", "z")
        self.refuse(USAGE, "one argument too many", "info", "x")

    def test_missing(self):
        self.refuse(USAGE, "no input", "run", "-o", "x")
        self.refuse(USAGE, "no output", "run", "x")
        self.refuse(USAGE, "no input", "check")

    def test_values(self):
        write_file(self.input, make_layer(), DEFAULT_METADATA)
        self.refuse_run(USAGE, "--isa 'sse9': wanted one of auto, portable, avx2", "--isa", "sse9")
        self.refuse_run(USAGE, "--isa 'all'", "--isa", "all")
        self.refuse_run(USAGE, "--precision 'fp16': wanted fp32 or bf16", "--precision", "fp16")
        self.refuse_run(USAGE, "--device 'tpu': wanted auto, cpu or cuda", "--device", "tpu")
        for text in ("0", "-1", "", "x", "1.5", "2x", " 2", "99999", "99999999999999999999"):
            self.refuse_run(USAGE, f"--threads '{text}': wanted 1 to 4096", f"--threads={text}")
        for text in ("", "x", "nan", "inf", "0", "0x10", "1e999", "1 "):
            self.refuse_run(USAGE, f"--scale '{text}': wanted", f"--scale={text}")
        for text in ("", "-7", "1", "nan", "None", "-5.01"):
            self.refuse_run(USAGE, f"--lower-bound '{text}': wanted", f"--lower-bound={text}")
        self.refuse_run(USAGE, "--piece-tokens '0': wanted", "--piece-tokens", "0")

    def test_stdout_full(self):
        with open("/dev/full", "wb") as full:
            done = subprocess.run([PROGRAM, "info"], stdout=full, stderr=subprocess.PIPE)
        self.assertEqual(done.returncode, OUTPUT)
        self.assertIn(b"cannot write to stdout", done.stderr)


class Info(Case):
    def test_text_and_json(self):
        text, _ = self.call("info")
        info = json.loads(self.call("info", "--json")[0])
        self.assertIn("portable", info["cpu_built"])
        self.assertIn("portable", info["cpu_usable"])
        self.assertLessEqual(set(info["cpu_usable"]), set(info["cpu_built"]))
        self.assertIn(info["cpu_chosen"], info["cpu_usable"])
        self.assertGreaterEqual(info["num_threads"], 1)
        self.assertIn(info["version"], text)
        self.assertIn(info["cpu_chosen"], text)

    def test_environment(self):
        info = json.loads(self.call("info", "--json", env={"FLASH_KDA_CPU_ISA": "portable"})[0])
        self.assertEqual(info["cpu_chosen"], "portable")
        info = json.loads(self.call("info", "--json", env={"FLASH_KDA_NUM_THREADS": "3"})[0])
        self.assertEqual(info["num_threads"], 3)

    def test_wrong_environment(self):
        write_file(self.input, make_layer(), DEFAULT_METADATA)
        for name, value in (
            ("FLASH_KDA_CPU_ISA", "sse9"),
            ("FLASH_KDA_NUM_THREADS", "0"),
            ("FLASH_KDA_PRECISION", "fp8"),
        ):
            self.refuse(LIBRARY, name, "info", env={name: value})
            self.refuse_run(LIBRARY, name, env={name: value})


class Run(Case):
    def test_values(self):
        """Layout and values of both outputs, against the recurrence in Python."""
        tensors = make_layer(T=5, H=2)
        write_file(self.input, tensors, {"lower_bound": "-3", "scale": "0.25"})
        stdout, stderr = self.call("run", self.input, "-o", self.output)
        self.assertIn("wrote", stdout)
        self.assertEqual(stderr, "")
        results, metadata = read_file(self.output)
        self.assertEqual(sorted(results), ["final_state", "out"])
        self.assertEqual(results["out"][:2], ("BF16", [1, 5, 2, D]))
        self.assertEqual(results["final_state"][:2], ("F32", [1, 2, D, D]))
        self.assertEqual(float(metadata["scale"]), 0.25)
        self.assertEqual(float(metadata["lower_bound"]), -3)
        out, states = recurrence(tensors, -3, 0.25)
        self.assertLess(ratio(bf16_values(results["out"][2]), out), 2e-3)
        got = struct.unpack(f"<{2 * D * D}f", results["final_state"][2])
        self.assertLess(ratio(got, states), 1e-6)

    def test_options_beat_metadata(self):
        tensors = make_layer(T=5)
        write_file(self.input, tensors, {"lower_bound": "-3", "scale": "0.25"})
        self.call("run", self.input, "-o", self.output, "--scale", "2", "--lower-bound", "-1")
        out, _ = recurrence(tensors, -1, 2)
        results, _ = read_file(self.output)
        self.assertLess(ratio(bf16_values(results["out"][2]), out), 2e-3)

    def test_default_scale(self):
        write_file(self.input, make_layer(), DEFAULT_METADATA)
        with_default = read_file_bytes(self.run_bytes(), "out")
        explicit = read_file_bytes(self.run_bytes("--scale", repr(1 / math.sqrt(D))), "out")
        self.assertEqual(with_default, explicit)

    def test_json(self):
        write_file(self.input, make_layer("a.b.", T=33, H=2, HV=4, B=2), DEFAULT_METADATA)
        result = json.loads(self.call("run", self.input, "-o", self.output, "--json")[0])
        (layer,) = result["layers"]
        self.assertEqual(layer["prefix"], "a.b.")
        wanted = {"B": 2, "T": 33, "H": 2, "HV": 4, "K": D, "V": D, "N": 2, "tokens": 66}
        self.assertEqual({key: layer[key] for key in wanted}, wanted)
        self.assertRegex(layer["kernel"], r"^cpu/\w+/\w+$")
        self.assertGreater(layer["ms"], 0)
        for key in ("tokens_per_s", "gb_per_s", "gflop_per_s", "threads"):
            self.assertGreater(layer[key], 0)
        self.assertEqual(sorted(read_file(self.output)[0]), ["a.b.final_state", "a.b.out"])

    def test_every_isa(self):
        write_file(self.input, make_layer(T=40, H=2), DEFAULT_METADATA)
        for isa in self.usable_isas():
            result = json.loads(
                self.call("run", self.input, "-o", self.output, "--json", "--isa", isa)[0]
            )
            self.assertTrue(result["layers"][0]["kernel"].startswith("cpu/"))
            self.call("check", self.input, "--isa", isa)

    def test_unusable_isa(self):
        write_file(self.input, make_layer(), DEFAULT_METADATA)
        everything = ["portable", "avx2", "avx512", "avx512_bf16", "amx_bf16"]
        unusable = [isa for isa in everything if isa not in self.usable_isas()]
        if not unusable:
            self.skipTest("this machine runs every kernel set")
        for isa in unusable:
            self.refuse_run(LIBRARY, isa, "--isa", isa)

    def test_precision(self):
        write_file(self.input, make_layer(), DEFAULT_METADATA)
        self.refuse_run(LIBRARY, "bf16", "--isa", "portable", "--precision", "bf16")

    def test_cuda(self):
        write_file(self.input, make_layer(), DEFAULT_METADATA)
        self.refuse_run(LIBRARY, "--device cuda: this program runs on the CPU", "--device", "cuda")
        for device in ("cpu", "auto"):
            self.call("run", self.input, "-o", self.output, "--device", device)

    def test_same_bits(self):
        """Threads and pieces change nothing."""
        cu = ("I64", [4], struct.pack("<4q", 0, 7, 70, 90))
        state = ("F32", [3, 2, D, D], f32_bytes([0.01 * (i % 7) for i in range(3 * 2 * D * D)]))
        extra = {"cu_seqlens": cu, "initial_state": state}
        write_file(self.input, make_layer(T=100, H=2, extra=extra), DEFAULT_METADATA)
        wanted = self.run_bytes()
        for arguments in (
            ["--threads", "1"],
            ["--threads", "2"],
            ["--threads", "5"],
            ["--piece-tokens", "16"],
            ["--piece-tokens", "33"],
        ):
            self.assertEqual(self.run_bytes(*arguments), wanted, arguments)
        # Rows past the last offset belong to no sequence: zeros, as the file was made.
        out = read_file(self.output)[0]["out"][2]
        self.assertEqual(out[90 * 2 * D * 2 :], bytes(10 * 2 * D * 2))
        self.assertNotEqual(out[: 90 * 2 * D * 2].strip(b"\0"), b"")

    def test_no_tokens(self):
        write_file(self.input, make_layer(T=0), DEFAULT_METADATA)
        stdout, _ = self.call("run", self.input, "-o", self.output, "--json")
        json.loads(stdout)
        results, _ = read_file(self.output)
        self.assertEqual(results["out"], ("BF16", [1, 0, 1, D], b""))
        self.assertEqual(results["final_state"][2], bytes(4 * D * D))
        self.call("check", self.input)

    def test_flags(self):
        """Metadata names the operator's flags; a beta activated by hand gives the same."""
        tensors = make_layer(T=5)
        write_file(self.input, tensors, DEFAULT_METADATA)
        self.call("run", self.input, "-o", self.output)
        wanted = bf16_values(read_file(self.output)[0]["out"][2])
        logits = bf16_values(tensors["beta"][2])
        activated = f32_bytes([1 / (1 + math.exp(-x)) for x in logits])
        del tensors["beta"]
        tensors = {"beta": ("F32", [1, 5, 1], activated), **tensors}
        write_file(self.input, tensors, {**DEFAULT_METADATA, "use_beta_sigmoid_in_kernel": "false"})
        self.call("run", self.input, "-o", self.output)
        self.assertLess(ratio(bf16_values(read_file(self.output)[0]["out"][2]), wanted), 1e-3)

        write_file(self.input, tensors, {**DEFAULT_METADATA, "use_gate_in_kernel": "no"})
        self.refuse_run(INPUT, "metadata use_gate_in_kernel 'no': wanted true or false")
        write_file(self.input, tensors, {"use_gate_in_kernel": "false"})
        self.refuse_run(INPUT, "A_log")  # an activated gate leaves it nothing to do

    def test_softplus(self):
        write_file(self.input, make_layer(), {"lower_bound": "none"})
        self.call("check", self.input)
        self.call("run", self.input, "-o", self.output)
        self.assertEqual(read_file(self.output)[1]["lower_bound"], "none")


def read_file_bytes(blob, name):
    with tempfile.NamedTemporaryFile() as file:
        file.write(blob)
        file.flush()
        return read_file(file.name)[0][name][2]


class Layers(Case):
    def test_all_of_them(self):
        tensors = {**make_layer("layer0.", seed=1), **make_layer("layer1.", seed=2)}
        write_file(self.input, tensors, DEFAULT_METADATA)
        self.call("run", self.input, "-o", self.output)
        both, _ = read_file(self.output)
        self.assertEqual(
            sorted(both), ["layer0.final_state", "layer0.out", "layer1.final_state", "layer1.out"]
        )
        for prefix in ("layer1", "layer1."):
            self.call("run", self.input, "-o", self.output, "--prefix", prefix)
            one, _ = read_file(self.output)
            self.assertEqual(sorted(one), ["layer1.final_state", "layer1.out"])
            self.assertEqual(one["layer1.out"], both["layer1.out"])

    def test_incomplete(self):
        tensors = {**make_layer("layer0."), **make_layer("layer1.")}
        del tensors["layer1.g"]
        write_file(self.input, tensors, DEFAULT_METADATA)
        _, stderr = self.call("run", self.input, "-o", self.output)
        self.assertIn("left out 1 incomplete layer: 'layer1' has no tensor g", stderr)
        self.assertEqual(sorted(read_file(self.output)[0]), ["layer0.final_state", "layer0.out"])
        self.refuse_run(INPUT, "no layer: 'layer1' has no tensor g", "--prefix", "layer1")
        self.refuse_run(INPUT, "no layer: 'other' has no tensor q", "--prefix", "other")

    def test_none(self):
        write_file(self.input, {"w": ("F32", [1], f32_bytes([1]))}, DEFAULT_METADATA)
        self.refuse_run(INPUT, "no layer: no tensor is named q or ends in .q")
        write_file(self.input, {}, None)
        self.refuse_run(INPUT, "no lower_bound in the metadata")

    def test_other_tensors_do_not_matter(self):
        tensors = {"w": ("F32", [1], f32_bytes([1])), "n": ("U8", [4], b"abcd"), **make_layer()}
        write_file(self.input, tensors, DEFAULT_METADATA)
        self.call("run", self.input, "-o", self.output)

    def test_metadata(self):
        write_file(self.input, make_layer(), None)
        self.refuse_run(INPUT, "no lower_bound in the metadata: give --lower-bound")
        self.call("run", self.input, "-o", self.output, "--lower-bound", "-5")
        self.output.unlink()
        for key, text in (
            ("scale", "nan"),
            ("scale", "0"),
            ("scale", ""),
            ("scale", "1\x1b[2J"),
            ("lower_bound", "-7"),
            ("lower_bound", "0.5"),
            ("lower_bound", "x" * 500),
        ):
            write_file(self.input, make_layer(), {**DEFAULT_METADATA, key: text})
            self.refuse_run(INPUT, f"metadata {key} '")
        for text in ("-5", "0", "-0.001", "-5e0"):
            write_file(self.input, make_layer(), {"lower_bound": text})
            self.call("run", self.input, "-o", self.output)

    def test_wrong_tensors(self):
        """Every wrong shape or dtype is refused with the tensor's name before anything is made."""

        def variant(name, dtype, shape):
            tensors = make_layer()
            del tensors[name]
            return {name: (dtype, shape, bytes(SIZES[dtype] * math.prod(shape))), **tensors}

        for name, dtype, shape, wanted in (
            ("q", "F16", [1, 20, 1, D], "q"),
            ("q", "U8", [1, 20, 1, D], "tensor 'q': dtype U8 cannot be used here"),
            ("q", "BF16", [20, 1, D], "q has 3 dimensions: wanted 4"),
            ("q", "BF16", [1, 1, 20, 1, D, 1], "tensor 'q': 6 dimensions: wanted 1 to 5"),
            ("q", "BF16", [], "tensor 'q': 0 dimensions"),
            ("k", "BF16", [1, 20, 1, 64], "k"),
            ("v", "BF16", [1, 21, 1, D], "v"),
            ("g", "BF16", [1, 20, 3, D], "g"),
            ("beta", "BF16", [1, 20], "beta"),
            ("A_log", "F32", [2], "A_log"),
            ("A_log", "BF16", [1], "A_log"),
            ("dt_bias", "F32", [D - 1], "dt_bias"),
        ):
            write_file(self.input, variant(name, dtype, shape), DEFAULT_METADATA)
            self.refuse_run(INPUT, wanted)
        for extra, wanted in (
            ({"cu_seqlens": ("F32", [2], bytes(8))}, "cu_seqlens"),
            ({"cu_seqlens": ("I32", [1, 2], bytes(8))}, "cu_seqlens"),
            ({"cu_seqlens": ("I32", [0], b"")}, "cu_seqlens"),
            ({"cu_seqlens": ("I32", [2], struct.pack("<2i", 1, 20))}, "cu_seqlens"),
            ({"cu_seqlens": ("I32", [2], struct.pack("<2i", 0, 4096))}, "cu_seqlens"),
            ({"cu_seqlens": ("I32", [2], struct.pack("<2i", 0, -20))}, "cu_seqlens"),
            ({"cu_seqlens": ("I64", [4], struct.pack("<4q", 0, 15, 10, 20))}, "cu_seqlens"),
            ({"initial_state": ("F32", [1, 1, D, 1], bytes(4 * D))}, "initial_state"),
            ({"initial_state": ("I64", [1], bytes(8))}, "initial_state"),
        ):
            write_file(self.input, {**extra, **make_layer()}, DEFAULT_METADATA)
            self.refuse_run(INPUT, wanted)
            self.refuse(INPUT, wanted, "check", self.input)


class Files(Case):
    def test_input(self):
        self.refuse_run(INPUT, "cannot open it: No such file or directory")
        self.refuse(INPUT, "not a regular file", "check", self.folder)
        self.input.write_bytes(b"")
        self.refuse_run(INPUT, "the file is empty")

    def test_lies(self):
        """A few; tests/tool/test_safetensors.c has them all."""
        write_file(self.input, make_layer(), DEFAULT_METADATA)
        good = self.input.read_bytes()
        for blob, wanted in (
            (good[:-1], "data_offsets"),
            (good + b"x", "the file holds"),
            (good[:5], "5 bytes are too few"),
            (b"\xff" * 8 + good[8:], "header length 18446744073709551615"),
            (good.replace(b'"BF16"', b'"BF17"', 1), "unknown dtype 'BF17'"),
            (good.replace(b'"beta"', b'"k"   ', 1), "tensor 'k' occurs twice"),
            (good.replace(b'"beta"', b'"be\xffa"', 1), "not UTF-8"),
            (b"PK\x03\x04" + bytes(100), "header length"),
        ):
            self.assertNotEqual(blob, good)
            self.input.write_bytes(blob)
            self.refuse_run(INPUT, wanted)
            self.refuse(INPUT, wanted, "check", self.input)

    def test_state_larger_than_any_machine(self):
        """A file of a few hundred bytes without tokens may still ask for a state of petabytes."""
        for exponent, run_code, check_code in ((40, OUTPUT, LIBRARY), (50, INPUT, INPUT)):
            heads = {"q": 1, "k": 1, "v": 2**exponent, "g": 2**exponent}
            tensors = {name: ("BF16", [1, 0, heads[name], D], b"") for name in heads}
            tensors["beta"] = ("BF16", [1, 0, 2**exponent], b"")
            write_file(self.input, tensors, DEFAULT_METADATA)
            self.refuse_run(run_code, str(self.folder))
            self.refuse(check_code, "state", "check", self.input)

    def test_output_is_input(self):
        write_file(self.input, make_layer(), DEFAULT_METADATA)
        self.refuse(USAGE, "the output is the input", "run", self.input, "-o", self.input)
        self.output.symlink_to(self.input)
        self.refuse_run(USAGE, "the output is the input")
        self.output.unlink()
        os.link(self.input, self.output)
        self.refuse_run(USAGE, "the output is the input")

    def test_unwritable(self):
        write_file(self.input, make_layer(T=2000, H=1, parameters=False), DEFAULT_METADATA)
        (self.folder / "sub").mkdir()
        for path in ("none/out", "in.safetensors/out", "sub", "/dev/null", "/proc/out"):
            start = time.monotonic()
            self.refuse(OUTPUT, path, "run", self.input, "-o", self.folder / path)
            self.assertLess(time.monotonic() - start, 5)

    def test_file_size_limit(self):
        """A full disk, as far as a test may make one."""
        write_file(self.input, make_layer(), DEFAULT_METADATA)

        def limit():
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))

        self.refuse_run(OUTPUT, "cannot reserve", preexec_fn=limit)

    def test_replaces_a_file(self):
        write_file(self.input, make_layer(), DEFAULT_METADATA)
        self.output.write_bytes(b"old")
        self.run_bytes()
        names = sorted(p.name for p in self.folder.iterdir())
        self.assertEqual(names, ["in.safetensors", "out.safetensors"])
        self.assertIn("out", read_file(self.output)[0])
        mask = os.umask(0)
        os.umask(mask)
        self.assertEqual(self.output.stat().st_mode & 0o777, 0o666 & ~mask)

    def interrupt(self, number):
        """Sends the signal while the temporary file exists. False: the program was faster."""
        self.output.write_bytes(b"old")
        child = subprocess.Popen(
            [PROGRAM, "run", self.input, "-o", self.output, *SLOWLY],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        while child.poll() is None and len(list(self.folder.iterdir())) < 3:
            time.sleep(0.001)
        child.send_signal(number)
        child.communicate(timeout=60)
        self.assertEqual(len(list(self.folder.iterdir())), 2)
        if child.returncode == OK:
            return False
        self.assertEqual(child.returncode, -number)
        self.assertEqual(self.output.read_bytes(), b"old")
        return True

    def test_interrupted(self):
        """A signal in the middle leaves the old output and nothing else."""
        write_file(self.input, make_long_layer(), DEFAULT_METADATA)
        for number in (signal.SIGINT, signal.SIGTERM):
            self.assertTrue(any(self.interrupt(number) for _ in range(20)))


SLOWLY = ["--isa", "portable", "--threads", "1"]


def make_long_layer(T=16384, H=2):
    """A layer that takes the portable kernels a while; made of repeated rows, so cheap to write."""
    short = make_layer(T=16, H=H)
    for name in ("q", "k", "v", "g", "beta"):
        dtype, shape, data = short[name]
        short[name] = (dtype, [1, T, *shape[2:]], data * (T // 16))
    return short


class Check(Case):
    def test_passes(self):
        write_file(self.input, make_layer("layer3.", T=50, H=2, HV=4), DEFAULT_METADATA)
        stdout, stderr = self.call("check", self.input)
        self.assertIn("layer3", stdout)
        self.assertIn("ok", stdout)
        self.assertEqual(stderr, "")

    def test_json(self):
        write_file(self.input, make_layer("layer3.", T=50, H=2, B=2), DEFAULT_METADATA)
        result = json.loads(self.call("check", self.input, "--json")[0])
        (layer,) = result["layers"]
        self.assertIs(result["passed"], True)
        self.assertIs(layer["passed"], True)
        self.assertEqual(layer["out"]["bound"], 1.75e-3)
        self.assertEqual(layer["state"]["bound"], 1e-6)
        for key in ("out", "state"):
            self.assertGreater(layer[key]["ratio"], 0)
            self.assertLessEqual(layer[key]["ratio"], layer[key]["bound"])
            self.assertGreater(layer[key]["max_abs_error"], 0)
        decay = layer["decay"]
        order = [decay[key] for key in ("p01", "p10", "p50", "p90", "p99")]
        self.assertEqual(order, sorted(order))
        self.assertGreaterEqual(order[0], -5)
        self.assertEqual(sum(decay["histogram"]["counts"]), decay["count"])
        self.assertEqual(decay["count"], 2 * 50 * 2 * D)
        self.assertTrue(0 < layer["beta"]["mean"] < layer["beta"]["p99"] < 1)

    def test_fails(self):
        """A NaN that reaches an output is past every bound."""
        tensors = make_layer()
        dtype, shape, data = tensors["v"]
        tensors["v"] = (dtype, shape, bf16_bytes([math.nan]) + data[2:])
        write_file(self.input, tensors, DEFAULT_METADATA)
        stdout, _ = self.call("check", self.input, code=CHECK_FAILED)
        self.assertIn("FAILED", stdout)
        result = json.loads(self.call("check", self.input, "--json", code=CHECK_FAILED)[0])
        self.assertIs(result["passed"], False)
        self.assertIsNone(result["layers"][0]["out"]["ratio"])

    def test_bf16_bounds(self):
        write_file(self.input, make_layer(T=50), DEFAULT_METADATA)
        done = subprocess.run(
            [PROGRAM, "check", self.input, "--precision", "bf16", "--json"],
            capture_output=True,
            timeout=60,
        )
        if done.returncode == LIBRARY:
            self.assertIn(b"bf16", done.stderr)
            self.skipTest("no kernel set of this machine has bf16 products")
        self.assertEqual(done.returncode, OK, done)
        (layer,) = json.loads(done.stdout)["layers"]
        self.assertEqual((layer["out"]["bound"], layer["state"]["bound"]), (4e-3, 4e-3))

    def test_bundled_data(self):
        path = os.environ.get("FLASH_KDA_DATA", SLICE)
        result = json.loads(self.call("check", path, "--json")[0])
        self.assertTrue(result["passed"])
        self.assertGreaterEqual(len(result["layers"]), 2)
        medians = {layer["prefix"]: layer["decay"]["p50"] for layer in result["layers"]}
        self.assertTrue(-0.1 < medians["layer0."] < -0.03)
        self.assertTrue(-0.02 < medians["layer5."] < -0.001)  # the slow one

    def test_picture(self):
        write_file(self.input, make_layer("layer3."), DEFAULT_METADATA)
        result = self.call("check", self.input, "--json")[0]
        for encoding in ("utf-8", "ascii"):
            done = subprocess.run(
                [sys.executable, ROOT / "scripts" / "plot_check.py"],
                input=result.encode(),
                capture_output=True,
                env={**os.environ, "PYTHONIOENCODING": encoding},
                timeout=60,
            )
            self.assertEqual(done.returncode, 0, done.stderr)
            text = done.stdout.decode(encoding)
            self.assertIn("layer3", text)
            self.assertIn("1e-3", text)
        done = subprocess.run(
            [sys.executable, ROOT / "scripts" / "plot_check.py"], input=b"{}", capture_output=True
        )
        self.assertEqual(done.returncode, 1)
        self.assertIn(b"not an output of flashkda check", done.stderr)


class Progress(Case):
    def in_terminal(self, *arguments, term="xterm"):
        """Runs with stderr on a terminal; returns what it showed."""
        try:
            master, slave = pty.openpty()
        except OSError as error:
            self.skipTest(f"no pseudo-terminal on this machine: {error}")
        environment = {**os.environ, "TERM": term}
        child = subprocess.Popen(
            [PROGRAM, *map(str, arguments)],
            stdout=subprocess.DEVNULL,
            stderr=slave,
            env=environment,
        )
        os.close(slave)
        shown = b""
        while True:
            try:
                data = os.read(master, 4096)
            except OSError:  # the other end is closed
                break
            if not data:
                break
            shown += data
        os.close(master)
        self.assertEqual(child.wait(timeout=60), OK, shown)
        return shown.decode()

    def setUp(self):
        super().setUp()
        write_file(self.input, make_long_layer(), DEFAULT_METADATA)
        self.arguments = ["run", self.input, "-o", self.output, *SLOWLY]

    def test_bar(self):
        shown = self.in_terminal(*self.arguments, "--piece-tokens", "512")
        self.assertRegex(shown, r"\r\[#+\.+\] +\d+ %  q \(1 of 1\)  \d+\.\d s")
        self.assertTrue(shown.endswith("\r\x1b[K"), repr(shown[-40:]))  # cleared at the end
        with_bar = self.output.read_bytes()
        self.call(*self.arguments)
        self.assertEqual(self.output.read_bytes(), with_bar)

    def test_none(self):
        self.assertEqual(self.in_terminal(*self.arguments, "--quiet"), "")
        self.assertEqual(self.in_terminal(*self.arguments, term="dumb"), "")
        _, stderr = self.call(*self.arguments)
        self.assertEqual(stderr, "")


class Bench(Case):
    FIELDS = """commit date cpu driver compiler kind case regime impl kernel isa precision threads
        samples median_ms p10_ms p90_ms min_ms floor_ms bytes flops fma_peak_gflops copy_gb_per_s
        share_of_fma_peak share_of_copy error_out error_state""".split()

    def records(self, *arguments):
        stdout, stderr = self.call("bench", "--quick", "--json", "--threads", "1", *arguments)
        self.assertEqual(stderr, "")
        return [json.loads(line) for line in stdout.splitlines()]

    def expect_record(self, record, kind, case):
        self.assertLessEqual(set(self.FIELDS), set(record))
        self.assertEqual((record["kind"], record["case"]), (kind, case))
        self.assertGreater(record["samples"], 0)
        self.assertLessEqual(record["min_ms"], record["p10_ms"])
        self.assertLessEqual(record["p10_ms"], record["median_ms"])
        self.assertLessEqual(record["median_ms"], record["p90_ms"])
        self.assertGreater(record["floor_ms"], 0)
        self.assertGreater(record["copy_gb_per_s"], 0)
        self.assertGreater(record["fma_peak_gflops"], 0)
        bound = 4e-3 if record["precision"] == "bf16" else 2e-3  # a few elements scatter more
        self.assertLess(record["error_out"], bound)
        self.assertLess(record["error_state"], 4e-3 if record["precision"] == "bf16" else 1e-6)

    def test_prefill(self):
        for record in self.records("--case", "512x32", "--commit", "abc"):
            self.expect_record(record, "prefill", "512x32")
            self.assertEqual(record["commit"], "abc")
            self.assertEqual(record["regime"], "random")
            self.assertEqual(record["flops"], 6 * D * D * 512 * 32)
            self.assertIn("/prefill", record["kernel"])

    def test_decode(self):
        (record,) = self.records("--case", "N1xH32", "--regime", "slow")
        self.expect_record(record, "decode", "N1xH32")
        self.assertIn("/decode", record["kernel"])
        self.assertGreaterEqual(record["bytes"], 2 * 4 * D * D * 32)

    def test_trained(self):
        records = self.records("--case", "512x32", "--regime", "trained", "--input", SLICE)
        for record in records:
            self.expect_record(record, "prefill", "512x32")
            self.assertEqual(record["regime"], "trained")

    def test_text(self):
        text, _ = self.call("bench", "--quick", "--threads", "1", "--case", "N1xH32")
        self.assertIn("GFLOP/s", text)
        self.assertIn("decode N1xH32", text)

    def test_wrong_options(self):
        self.refuse(USAGE, "--case '3x3': no such case", "bench", "--case", "3x3")
        wanted = "--regime 'fast': wanted random, slow or trained"
        self.refuse(USAGE, wanted, "bench", "--regime", "fast")
        self.refuse(USAGE, "belong together", "bench", "--regime", "trained")
        self.refuse(USAGE, "belong together", "bench", "--regime", "slow", "--input", SLICE)
        self.refuse(INPUT, "cannot open it", "bench", "--input", self.folder / "none")
        self.refuse(USAGE, "--isa 'x': wanted one of auto", "bench", "--isa", "x")
        self.refuse(USAGE, "one argument too many", "bench", "x")


def main():
    global PROGRAM
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--program", required=True)
    options, rest = parser.parse_known_args()
    PROGRAM = options.program
    unittest.main(argv=[sys.argv[0], *rest])


if __name__ == "__main__":
    main()
