#!/usr/bin/env python3
"""Compiles the CUDA kernels with another release's compiler: NVRTC, which PyPI has for each.

    python3 -m venv VENV
    VENV/bin/pip install "nvidia-cuda-nvrtc-cu12==12.9.*" "nvidia-cuda-runtime-cu12==12.9.*" \\
        "nvidia-cuda-cccl-cu12==12.9.*"
    VENV/bin/python scripts/compile_with_nvrtc.py OUT [ARCH...]

NVRTC is the device compiler of nvcc as a library: the same front end, optimiser and assembler. What
it leaves out is nvcc's host side, which for these kernels is one launch stub each. Writes a cubin
for each kernel file and architecture (default: all that docs/cuda.md names) into the folder OUT,
for kernel_resources.py. Exits with 1 at the first file that does not compile.
"""

import argparse
import ctypes
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = Path(sysconfig.get_path("purelib")) / "nvidia"
ARCHS = "80 86 89 90a 100a 103a 120a 121a".split()

# NVRTC knows no system headers.
HEADERS = {
    b"stddef.h": b"#define offsetof(type, member) ((unsigned long)&((type *)0)->member)\n",
    b"stdlib.h": b"",
    b"stdint.h": b"""
        typedef signed char int8_t;   typedef unsigned char uint8_t;
        typedef short int16_t;        typedef unsigned short uint16_t;
        typedef int int32_t;          typedef unsigned int uint32_t;
        typedef long int64_t;         typedef unsigned long uint64_t;
        typedef unsigned long uintptr_t;""",
}


def texts(values):
    return (ctypes.c_char_p * len(values))(*values)


class Nvrtc:
    def __init__(self):
        self.lib = ctypes.CDLL(next((PACKAGES / "cuda_nvrtc" / "lib").glob("libnvrtc.so.*")))
        major, minor = ctypes.c_int(), ctypes.c_int()
        self.lib.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
        self.version = f"{major.value}.{minor.value}"

    def output(self, program, what):
        size = ctypes.c_size_t()
        getattr(self.lib, f"nvrtcGet{what}Size")(program, ctypes.byref(size))
        data = ctypes.create_string_buffer(max(size.value, 1))
        getattr(self.lib, f"nvrtcGet{what}")(program, data)
        return data.raw[: size.value]

    def compile(self, path, options):
        """(cubin, or None where it does not compile; what the compiler said)"""
        program = ctypes.c_void_p()
        names, contents = texts(list(HEADERS)), texts(list(HEADERS.values()))
        self.lib.nvrtcCreateProgram(
            ctypes.byref(program),
            path.read_bytes(),
            path.name.encode(),
            len(HEADERS),
            contents,
            names,
        )
        flags = texts([option.encode() for option in options])
        status = self.lib.nvrtcCompileProgram(program, len(options), flags)
        said = self.output(program, "ProgramLog").rstrip(b"\0").decode()
        cubin = self.output(program, "CUBIN") if status == 0 else None
        self.lib.nvrtcDestroyProgram(ctypes.byref(program))
        return cubin, said


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("archs", nargs="*", default=ARCHS, metavar="ARCH")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    nvrtc = Nvrtc()
    folders = [ROOT / "include", ROOT / "src", PACKAGES / "cuda_runtime" / "include"]
    folders += [PACKAGES / "cuda_cccl" / "include"]
    common = [f"-I{folder}" for folder in folders]
    common += ["--std=c++17", "--generate-line-info", "-default-device"]
    for arch in options.archs:
        for path in sorted((ROOT / "src" / "cuda" / "kernels").glob("*.cu")):
            if path.stem.endswith("_sm90") and arch != "90a":
                continue
            cubin, said = nvrtc.compile(path, [f"--gpu-architecture=sm_{arch}", *common])
            print(f"NVRTC {nvrtc.version}, sm_{arch}, {path.name}: {cubin and len(cubin)} bytes")
            if said:
                print(said, file=sys.stderr)
            if cubin is None:
                return 1
            (options.out / f"{path.stem}.sm_{arch}.cubin").write_bytes(cubin)
    return 0


if __name__ == "__main__":
    sys.exit(main())
