"""What all tests of the Python package share."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

for name in ("CPU_ISA", "PRECISION", "NUM_THREADS", "CUDA_PATH"):
    # the caller's settings must not change what is tested
    os.environ.pop(f"FLASH_KDA_{name}", None)

import flash_kda


def pytest_configure(config):
    config.addinivalue_line("markers", "slow: takes more than about ten seconds on two cores")


def pytest_report_header(config):
    found = flash_kda.info()
    return (
        f"flash_kda {found['version']} from {os.path.dirname(flash_kda.__file__)}; CPU kernels "
        f"{', '.join(found['cpu_isa_usable'])}; {found['num_threads']} threads"
    )


@pytest.fixture(params=flash_kda.info()["cpu_isa_usable"])
def isa(request):
    """Each set of CPU kernels that this machine can run, by name."""
    return request.param


@pytest.fixture(scope="session")
def install(request):
    """install(requirement): its folder, kept in pytest's cache between runs."""

    def install_once(requirement):
        folder = Path(request.config.cache.mkdir("packages")) / requirement.replace("==", "-")
        ready = folder / "ready"
        if not ready.exists():
            pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-input", "--no-deps"]
            done = subprocess.run(
                [*pip, "--upgrade", "--target", folder, requirement], capture_output=True, text=True
            )
            if done.returncode != 0:
                pytest.skip(f"pip cannot install {requirement}: {done.stderr.strip()[-300:]}")
            ready.touch()
        return folder

    return install_once
