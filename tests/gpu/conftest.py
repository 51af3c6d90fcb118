"""GPU tests: they run where there are a CUDA device, torch with CUDA and a build with CUDA kernels,
and are skipped with the reason elsewhere. A run leaves a line in records.jsonl (gpu_record.py)."""

import collections
import os
import pathlib
import shlex
import sys
import time

import pytest

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "python")]  # inputs.py and definition.py are there

import gpu_record

import flash_kda


os.environ.pop("FLASH_KDA_CUDA_PATH", None)  # the caller's must not change what is tested


def why_not():
    """Why nothing here can run; None: it can."""
    found = flash_kda.info()
    if not found["cuda_archs"]:
        return "this build of flash_kda has no CUDA kernels"
    if not found["num_cuda_devices"]:
        return f"no usable GPU: {found['cuda_status']}"
    try:
        import torch
    except ImportError:
        return "no torch"
    if not torch.cuda.is_available():
        return "torch finds no CUDA device"
    return None


REASON = why_not()


@pytest.fixture(params=["sm80", "sm90", "sm90-forward"])
def path(request, monkeypatch):
    """The kernels of every call in the test (FLASH_KDA_CUDA_PATH); on_gpu.run demands that they
    ran. Modules ask for it with `pytestmark`; the others test what a user gets who sets nothing."""
    found = flash_kda.info()
    if request.param != "sm80" and found["cuda_path"] != "sm90":
        pytest.skip(f"no kernels of path sm90: {found['cuda_note']}")
    monkeypatch.setenv("FLASH_KDA_CUDA_PATH", request.param)
    return request.param


def pytest_configure(config):
    config.addinivalue_line("markers", "slow: takes more than about ten seconds")
    config.gpu_run = {"begin": time.monotonic(), "skipped": collections.Counter(), "counts": {}}


def pytest_report_header():
    found = flash_kda.info()
    archs = " ".join(found["cuda_archs"])
    return f"flash_kda {found['version']}: CUDA {archs}; {found['cuda_status']}"


def pytest_collection_modifyitems(items):
    if REASON:
        for item in items:
            if HERE in item.path.parents:
                item.add_marker(pytest.mark.skip(reason=REASON))


class Counter:
    def __init__(self, run):
        self.run = run

    def pytest_runtest_logreport(self, report):
        counts = self.run["counts"]
        if report.skipped:
            reason = (
                report.longrepr[2] if isinstance(report.longrepr, tuple) else "expected failure"
            )
            self.run["skipped"][reason.removeprefix("Skipped: ")] += 1
        elif report.failed:
            counts["failed"] = counts.get("failed", 0) + 1
        elif report.when == "call":
            counts["passed"] = counts.get("passed", 0) + 1


def pytest_sessionstart(session):
    session.config.pluginmanager.register(Counter(session.config.gpu_run), "gpu-record-counter")


def pytest_sessionfinish(session):
    run = session.config.gpu_run
    if REASON or not run["counts"] or session.config.option.collectonly:
        return
    if hasattr(session.config, "workerinput"):  # of pytest-xdist, whose controller counts for all
        return
    import torch

    line = gpu_record.append(
        torch.cuda.get_device_name(),
        run["counts"].get("passed", 0),
        run["counts"].get("failed", 0),
        dict(run["skipped"]),
        time.monotonic() - run["begin"],
        shlex.join(["python", "-m", "pytest", *session.config.invocation_params.args]),
        {"torch": torch.__version__, "archs": " ".join(flash_kda.info()["cuda_archs"])},
    )
    print(f"\nrecorded: {line}")
