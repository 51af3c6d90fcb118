#!/usr/bin/env python3
"""`flashkda check`, its picture and the progress bar. FLASH_KDA_DATA may name the recording."""

import json
import math
import os
import pty
import subprocess
import sys

from cli_case import (
    CHECK_FAILED,
    DEFAULT_METADATA,
    LIBRARY,
    OK,
    ROOT,
    SLICE,
    SLOWLY,
    Case,
    D,
    bf16_bytes,
    main,
    make_layer,
    make_long_layer,
    write_file,
)


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
            [self.program, "check", self.input, "--precision", "bf16", "--json"],
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
            [self.program, *map(str, arguments)],
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
        """The float64 reference takes a second or more for these tokens on any machine."""
        shown = self.in_terminal("check", self.input, "--threads", "1")
        self.assertRegex(shown, r"\r\[#+\.+\] +\d+ %  unnamed \(1 of 1\)  \d+\.\d s")
        self.assertTrue(shown.endswith("\r\x1b[K"), repr(shown[-40:]))  # cleared at the end

    def test_same_bits(self):
        """With a bar the calls are cut in pieces; the result may not show it."""
        self.in_terminal(*self.arguments)
        with_bar = self.output.read_bytes()
        self.call(*self.arguments)
        self.assertEqual(self.output.read_bytes(), with_bar)

    def test_none(self):
        self.assertEqual(self.in_terminal(*self.arguments, "--quiet"), "")
        self.assertEqual(self.in_terminal(*self.arguments, term="dumb"), "")
        self.assertEqual(self.in_terminal("check", self.input, "--quiet"), "")
        for arguments in (self.arguments, ["check", self.input]):
            self.assertEqual(self.call(*arguments)[1], "")  # not a terminal


if __name__ == "__main__":
    main()
