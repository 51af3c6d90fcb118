#!/usr/bin/env python3
"""`flashkda` and files: lying ones, unwritable ones, interruption."""

import os
import resource
import signal
import subprocess
import time

from cli_case import (
    DEFAULT_METADATA,
    INPUT,
    LIBRARY,
    OK,
    OUTPUT,
    SLOWLY,
    USAGE,
    Case,
    D,
    main,
    make_layer,
    make_long_layer,
    read_file,
    write_file,
)


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
            (b"PK\x03\x04\x14\0\0\0\x08" + bytes(100), "not a safetensors file"),
            (b"# A document, longer than eight bytes\n", "not a safetensors file: wanted the"),
        ):
            self.assertNotEqual(blob, good)
            self.input.write_bytes(blob)
            self.refuse_run(INPUT, wanted)
            self.refuse(INPUT, wanted, "check", self.input)

    def test_state_larger_than_any_machine(self):
        """A file of a few hundred bytes without tokens may still ask for a state of petabytes."""
        for exponent, code in ((40, OUTPUT), (50, INPUT)):
            heads = {"q": 1, "k": 1, "v": 2**exponent, "g": 2**exponent}
            tensors = {name: ("BF16", [1, 0, heads[name], D], b"") for name in heads}
            tensors["beta"] = ("BF16", [1, 0, 2**exponent], b"")
            write_file(self.input, tensors, DEFAULT_METADATA)
            self.refuse_run(code, str(self.folder))
            # The address sanitizer refuses such a size in its own way, and says so on stderr too.
            done = subprocess.run(
                [self.program, "check", self.input],
                capture_output=True,
                env={**os.environ, "ASAN_OPTIONS": "allocator_may_return_null=1"},
                timeout=60,
            )
            self.assertEqual(done.returncode, LIBRARY if code == OUTPUT else INPUT)
            self.assertIn(b"state", done.stderr.splitlines()[-1])

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
            [self.program, "run", self.input, "-o", self.output, *SLOWLY],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        while child.poll() is None and len(list(self.folder.iterdir())) < 3:
            time.sleep(0.001)
        child.send_signal(number)
        child.communicate(timeout=60)
        self.assertEqual(len(list(self.folder.iterdir())), 2)
        self.assertIn(child.returncode, (OK, -number))
        if self.output.read_bytes() != b"old":  # too late: then it is whole
            self.assertIn("out", read_file(self.output)[0])
            return False
        self.assertEqual(child.returncode, -number)
        return True

    def test_interrupted(self):
        """A signal in the middle leaves the old output and nothing else."""
        write_file(self.input, make_long_layer(), DEFAULT_METADATA)
        for number in (signal.SIGINT, signal.SIGTERM):
            self.assertTrue(any(self.interrupt(number) for _ in range(20)))


if __name__ == "__main__":
    main()
