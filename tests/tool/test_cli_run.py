#!/usr/bin/env python3
"""`flashkda run`: values, bits, layers and metadata."""

import json
import math
import struct
import tempfile

from cli_case import (
    DEFAULT_METADATA,
    INPUT,
    LIBRARY,
    SIZES,
    Case,
    D,
    bf16_values,
    f32_bytes,
    main,
    make_layer,
    ratio,
    read_file,
    recurrence,
    write_file,
)


def read_file_bytes(blob, name):
    with tempfile.NamedTemporaryFile() as file:
        file.write(blob)
        file.flush()
        return read_file(file.name)[0][name][2]


class Run(Case):
    def test_values(self):
        """Layout and values of both outputs, against the recurrence in Python."""
        tensors = make_layer(T=5, H=2)
        write_file(self.input, tensors, {"lower_bound": "-3", "scale": "0.25"})
        stdout, stderr = self.call("run", self.input, "-o", self.output)
        self.assertIn("wrote", stdout)
        self.assertIn("\nunnamed ", stdout)  # the layer's name in the table
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


if __name__ == "__main__":
    main()
