"""The wheel as a user gets it: its tags, what is inside, and that it needs neither torch nor numpy.

tests/test.sh builds it and lets auditwheel bundle what the system may lack; FLASH_KDA_WHEEL names
the result.
"""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def wheel() -> Path:
    path = os.environ.get("FLASH_KDA_WHEEL")
    assert path, "FLASH_KDA_WHEEL must name the wheel to test (tests/test.sh sets it)"
    return Path(path)


def test_tags(wheel):
    """One file for every CPython from 3.10, on every Linux that auditwheel could vouch for."""
    name, version, python, abi, platform = wheel.stem.split("-")
    assert (name, python, abi) == ("flash_kda", "cp310", "abi3")
    if sys.platform == "linux":
        assert platform.startswith("manylinux_2_")


def test_auditwheel_accepts_it(wheel):
    command = [sys.executable, "-m", "auditwheel", "show", str(wheel)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "manylinux_2_" in " ".join(done.stdout.split())


def test_only_the_limited_api_is_used(wheel):
    command = [sys.executable, "-m", "abi3audit", "--strict", str(wheel)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_contents(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    assert {"flash_kda", "flash_kda_C.py"} <= tops
    assert {top.split("-")[0].split(".")[0] for top in tops} <= {"flash_kda", "flash_kda_C"}
    assert "flash_kda/py.typed" in names
    assert any(name.endswith("LICENSE") for name in names)
    assert not [name for name in names if name.endswith((".c", ".h", ".a", ".o"))]
    assert [n for n in names if n.startswith("flash_kda/") and n.endswith(".so")] == [
        "flash_kda/_C.abi3.so"
    ]


def test_it_works_alone(wheel, tmp_path):
    """A new environment with nothing else in it."""
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    python = tmp_path / "venv" / "bin" / "python"
    install = [python, "-m", "pip", "install", "--no-index", "--disable-pip-version-check", wheel]
    subprocess.run(install, check=True, capture_output=True)
    program = """
import importlib.util, flash_kda, flash_kda_C
assert importlib.util.find_spec("numpy") is None and importlib.util.find_spec("torch") is None
assert flash_kda_C.fwd is flash_kda._fwd_raw
info = flash_kda.info()
assert info["cpu_isa"] in info["cpu_isa_usable"] and "portable" in info["cpu_isa_usable"]
assert flash_kda.get_workspace_size(64, 2) > 0
"""
    done = subprocess.run([python, "-c", program], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
