"""scripts/kernel_resources.py: what it takes for a breach of the budget, and files it cannot read.

That it reads real cubins right is tested where they are built (ctest cuda_kernel_budget).
"""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "kernel_resources.py"
spec = importlib.util.spec_from_file_location("kernel_resources", SCRIPT)
kernel_resources = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = kernel_resources  # dataclasses look their module up
spec.loader.exec_module(kernel_resources)
Kernel = kernel_resources.Kernel

BUDGET = {"kernels": {"walk": {"registers": 80, "shared_bytes": 1024, "code_bytes": 4096}}}


def kernel(**changes):
    return Kernel("walk", "90a", **{"registers": 80, "shared_bytes": 1024} | changes)


@pytest.mark.parametrize(
    "changes, says",
    [
        ({}, None),
        ({"registers": 81}, "walk for 90a: registers 81, wanted at most 80"),
        ({"shared_bytes": 1025}, "walk for 90a: shared_bytes 1025, wanted at most 1024"),
        ({"code_bytes": 4097}, "walk for 90a: code_bytes 4097, wanted at most 4096"),
        ({"stack_bytes": 8}, "walk for 90a: a stack of 8 bytes, wanted none"),
        ({"calls_out": ["vprintf"]}, "walk for 90a: calls vprintf, wanted no call outside"),
    ],
)
def test_budget(changes, says):
    assert kernel_resources.check([kernel(**changes)], BUDGET, {"90a"}) == ([says] if says else [])


def test_a_kernel_without_a_budget_and_one_that_is_missing():
    other = Kernel("run", "90a", registers=8)
    assert kernel_resources.check([kernel(), other], BUDGET, {"90a"}) == [
        "run for 90a: no budget of that name"
    ]
    assert kernel_resources.check([kernel()], BUDGET, {"90a", "120a"}) == [
        "walk for 120a: in the budget, but not built"
    ]


def test_a_kernel_for_one_architecture():
    budget = {"kernels": {"walk": {"archs": ["90a"], "registers": 80}}}
    other = Kernel("walk", "80", registers=80)
    assert kernel_resources.check([kernel()], budget, {"80", "90a"}) == []
    assert kernel_resources.check([kernel(), other], budget, {"80", "90a"}) == [
        "walk for 80: wanted for 90a only"
    ]
    assert kernel_resources.check([], budget, {"80", "90a"}) == [
        "walk for 90a: in the budget, but not built"
    ]


def test_registers_that_setmaxnreg_needs():
    budget = {"kernels": {"walk": {"registers": 128, "least_registers": 128}}}
    assert kernel_resources.check([kernel(registers=128)], budget, {"90a"}) == []
    assert kernel_resources.check([kernel(registers=120)], budget, {"90a"}) == [
        "walk for 90a: registers 120, wanted 128, all of which setmaxnreg shares out anew"
    ]


@pytest.mark.parametrize(
    "name, contents, says",
    [
        ("walk.compute_90a.cubin", b"", "no 64-bit little-endian ELF file"),
        ("walk.compute_90a.cubin", b"\x7fELF\x02\x01" + bytes(20), ""),
        ("walk.cubin", b"", "no architecture in the name"),
        ("walk.o", b"", "no cubin in"),
    ],
)
def test_files_that_are_no_cubins(tmp_path, name, contents, says):
    (tmp_path / name).write_bytes(contents)
    done = subprocess.run([sys.executable, SCRIPT, tmp_path], capture_output=True, text=True)
    assert done.returncode == 1 and "Traceback" not in done.stderr and says in done.stderr


def test_the_budget_lists_the_kernels_of_the_sources():
    """Names that the launchers use, so that none is left out."""
    sources = SCRIPT.parents[1] / "src" / "cuda"
    launchers = "\n".join(path.read_text() for path in sources.glob("launch_*.c"))
    budget = json.loads((sources / "kernel_budget.json").read_text())
    assert all(f"void {name}(" in launchers for name in budget["kernels"])
    assert launchers.count("\nvoid fkda_") == len(budget["kernels"])
