#!/usr/bin/env python3
"""Registers, stack, shared memory and code size of every CUDA kernel, checked against a budget.

    python3 scripts/kernel_resources.py BUILD/cubin/ARCHS [BUILD/cubin/sm90/90a] [--output FILE]

Reads the cubins that a CUDA build keeps, one per source file and architecture; they are ELF files,
so no tool of the CUDA toolkit is needed. Spilled registers live in the stack frame: a frame of 0
bytes means no spills and no local arrays. Shared memory is the static part; from sm_90 on it counts
1 KB that the system reserves. `calls out` names symbols that the code does not hold itself, such as
a device-side printf or the support routines that some targets emulate instructions with.

Exits with 1 when a kernel is beyond its budget, when an architecture of the budget has no cubin, or
when a budget names a kernel that is not there.
"""

import argparse
import json
import re
import struct
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path

BUDGET = Path(__file__).resolve().parents[1] / "src" / "cuda" / "kernel_budget.json"

SYMBOL_SIZE = 24
# Attributes of .nv.info: a format byte (4: counted), an attribute byte, a length, then the payload.
COUNTED, FRAME_SIZE, REGISTERS = 4, 0x11, 0x2F


@dataclass
class Kernel:
    name: str
    arch: str
    registers: int = 0
    stack_bytes: int = 0
    shared_bytes: int = 0
    code_bytes: int = 0
    calls_out: list[str] = field(default_factory=list)


class Elf:
    """As much of a 64-bit little-endian ELF file as a cubin needs."""

    def __init__(self, data: bytes):
        if data[:6] != b"\x7fELF\x02\x01":
            raise ValueError("no 64-bit little-endian ELF file")
        self.data = data
        (start,) = struct.unpack_from("<Q", data, 40)
        size, count, names = struct.unpack_from("<HHH", data, 58)
        headers = [struct.unpack_from("<IIQQQQIIQQ", data, start + size * i) for i in range(count)]
        self.sections = []
        for name, _, _, _, offset, length, link, info, _, _ in headers:
            text = self.string(headers[names][4] + name)
            self.sections.append((text, offset, length, link, info))

    def string(self, at: int) -> str:
        return self.data[at : self.data.index(b"\0", at)].decode()

    def find(self, wanted: str):
        return next((s for s in self.sections if s[0] == wanted), None)

    def symbols(self) -> list[tuple[str, int, int]]:
        """(name, section index, kind) of every symbol; kind 2 is a function."""
        table = self.find(".symtab")
        if table is None:
            raise ValueError("no symbol table")
        _, offset, length, link, _ = table
        names = self.sections[link][1]
        found = []
        for at in range(offset, offset + length, SYMBOL_SIZE):
            name, kind, _, section = struct.unpack_from("<IBBH", self.data, at)
            found.append((self.string(names + name), section, kind & 15))
        return found

    def attributes(self, section: str) -> list[tuple[int, bytes]]:
        found = self.find(section)
        if found is None:
            return []
        at, end = found[1], found[1] + found[2]
        listed = []
        while at + 4 <= end:
            kind, attribute, length = struct.unpack_from("<BBH", self.data, at)
            at += 4
            if kind == COUNTED:
                listed.append((attribute, self.data[at : at + length]))
                at += length
        return listed


def arch_of(path: Path) -> str:
    """Of the file's name; nvcc leaves it out when it compiles for one, then of the folder's."""
    match = re.search(r"\.(?:compute|sm)_(\d+[af]?)\b", path.name)
    match = match or re.fullmatch(r"(\d+[af]?)(?:\+ptx)?", path.parent.resolve().name)
    if match is None:
        raise ValueError("no architecture in the name of the file or its folder")
    return match[1]


def read_cubin(path: Path) -> list[Kernel]:
    arch = arch_of(path)
    elf = Elf(path.read_bytes())
    symbols = elf.symbols()
    functions: dict[str, Kernel] = {}
    for name, _, length, _, _ in elf.sections:
        if name.startswith(".text."):
            functions[name[6:]] = Kernel(name[6:], arch, code_bytes=length)
    for name, _, length, _, _ in elf.sections:
        if name.startswith(".nv.shared.") and name[11:] in functions:
            functions[name[11:]].shared_bytes = length
    for attribute, payload in elf.attributes(".nv.info"):
        if attribute in (REGISTERS, FRAME_SIZE) and len(payload) == 8:
            index, value = struct.unpack("<II", payload)
            function = functions.get(symbols[index][0])
            if function and attribute == REGISTERS:
                function.registers = value
            elif function:
                function.stack_bytes = value
    # .nv.*: names of memory that the system reserves, no code
    outside = sorted(
        {name for name, section, _ in symbols if name and section == 0 and name[:4] != ".nv."}
    )
    for function in functions.values():
        function.calls_out = outside
        if function.registers == 0:
            raise ValueError(f"no register count of {function.name}")
    return list(functions.values())


def read_folders(folders: list[Path]) -> list[Kernel]:
    kernels = []
    for folder in folders:
        paths = sorted(folder.glob("*.cubin"))
        if not paths:
            raise SystemExit(f"kernel_resources.py: no cubin in {folder}: is it a CUDA build?")
        for path in paths:
            try:
                kernels += read_cubin(path)
            except (ValueError, struct.error) as error:
                raise SystemExit(f"kernel_resources.py: {path}: {error}") from error
    return sorted(kernels, key=lambda k: (k.name, int(re.sub(r"\D", "", k.arch)), k.arch))


def check(kernels: list[Kernel], budget: dict, archs: set[str]) -> list[str]:
    """What is wrong, a line each."""
    wrong = []
    for kernel in kernels:
        where = f"{kernel.name} for {kernel.arch}"
        allowed = budget["kernels"].get(kernel.name)
        if allowed is None:
            wrong.append(f"{where}: no budget of that name")
            continue
        if kernel.arch not in allowed.get("archs", [kernel.arch]):
            wrong.append(f"{where}: wanted for {', '.join(allowed['archs'])} only")
        for key in {"registers", "shared_bytes", "code_bytes"} & allowed.keys():
            if (value := getattr(kernel, key)) > allowed[key]:
                wrong.append(f"{where}: {key} {value}, wanted at most {allowed[key]}")
        if kernel.registers < allowed.get("least_registers", 0):
            wrong.append(
                f"{where}: registers {kernel.registers}, wanted {allowed['least_registers']}, "
                "all of which setmaxnreg shares out anew"
            )
        if kernel.stack_bytes:
            wrong.append(f"{where}: a stack of {kernel.stack_bytes} bytes, wanted none")
        if kernel.calls_out:
            wrong.append(f"{where}: calls {', '.join(kernel.calls_out)}, wanted no call outside")
    present = {(k.name, k.arch) for k in kernels}
    wrong += [
        f"{name} for {arch}: in the budget, but not built"
        for name, allowed in budget["kernels"].items()
        for arch in sorted(archs | {k.arch for k in kernels})
        if (name, arch) not in present and arch in allowed.get("archs", [arch])
    ]
    return wrong


def format_table(kernels: list[Kernel]) -> str:
    lines = [
        "| kernel | arch | registers | stack bytes | shared bytes | code bytes | calls out |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {k.name} | {k.arch} | {k.registers} | {k.stack_bytes} | {k.shared_bytes} | "
        f"{k.code_bytes} | {' '.join(k.calls_out) or '-'} |"
        for k in kernels
    ]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folders", type=Path, nargs="+", metavar="FOLDER")
    parser.add_argument("--budget", type=Path, default=BUDGET)
    parser.add_argument("--archs", default="", help="names that must be there: 80,90a")
    parser.add_argument("--output", type=Path, help="write the table here too")
    parser.add_argument("--json", type=Path, help="write the numbers here")
    parser.add_argument("--report-only", action="store_true", help="check no budget")
    arguments = parser.parse_args()
    kernels = read_folders(arguments.folders)
    table = format_table(kernels)
    if arguments.output:
        arguments.output.write_text(table)
    else:
        print(table, end="")
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(k) for k in kernels], indent=1) + "\n")
    if arguments.report_only:
        return 0
    archs = {name.replace("+ptx", "") for name in re.split(r"[,; ]+", arguments.archs) if name}
    wrong = check(kernels, json.loads(arguments.budget.read_text()), archs)
    for line in wrong:
        print(f"kernel_resources.py: {line}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
