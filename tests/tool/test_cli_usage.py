#!/usr/bin/env python3
"""Command lines of `flashkda`: help, options and their values, `flashkda info`."""

import json
import subprocess

from cli_case import (
    DEFAULT_METADATA,
    LIBRARY,
    OUTPUT,
    ROOT,
    USAGE,
    Case,
    main,
    make_layer,
    write_file,
)


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
        done = subprocess.run([self.program], capture_output=True, timeout=20)
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
            self.refuse_run(USAGE, f"--threads '{text}': wanted 1 to 1024", f"--threads={text}")
        for text in ("", "x", "nan", "inf", "0", "0x10", "1e999", "1 ", "1e39", "1e-60"):
            self.refuse_run(USAGE, f"--scale '{text}': wanted", f"--scale={text}")
        for text in ("", "-7", "1", "nan", "None", "-5.01"):
            self.refuse_run(USAGE, f"--lower-bound '{text}': wanted", f"--lower-bound={text}")
        self.refuse_run(USAGE, "--piece-tokens '0': wanted", "--piece-tokens", "0")

    def test_stdout_full(self):
        with open("/dev/full", "wb") as full:
            done = subprocess.run([self.program, "info"], stdout=full, stderr=subprocess.PIPE)
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


if __name__ == "__main__":
    main()
