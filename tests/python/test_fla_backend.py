"""flash_kda.fla on CPU tensors: fla_cases.py, and what has to do with importing it."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("torch")
pytest.importorskip("fla", reason="flash-linear-attention (fla-core) is not installed")
pytest.register_assert_rewrite("fla_cases")

from fla_cases import *  # noqa: F403
from fla_cases import V_FIRST, assert_left, moved, small
from fla_driver import run, run_elsewhere

import flash_kda

SMALL = {"B": 1, "T": 40, "H": 2, "import": True}


@pytest.fixture
def device():
    return "cpu"


def import_it(before="", **environment):
    program = f"{before}; import flash_kda.fla"
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
    )
    return done.returncode, done.stderr.splitlines()[-1] if done.stderr else ""


def test_import_without_fla():
    hide = "import sys; sys.modules['fla'] = None"
    status, error = import_it(hide)
    assert status != 0
    assert error.startswith("ImportError: flash_kda.fla: cannot import fla.ops.kda (")
    assert error.endswith('wanted flash-linear-attention: pip install "fla-core>=0.6.0"')


def test_import_with_an_fla_that_has_no_backends():
    remove = (
        "import sys, fla.ops.kda.chunk; del fla.ops.kda.chunk.dispatch; "
        "sys.modules['fla.ops.kda.backends'] = None"
    )
    status, error = import_it(remove)
    assert status != 0
    assert error.startswith("ImportError: flash_kda.fla: chunk_kda of fla-core ")
    assert error.endswith("wanted 0.5.0 or newer")


def test_devices_that_are_not_ours(backend):
    assert backend._why_no_device("cpu") is None
    found = flash_kda.info()
    if found["device"] == "cpu":
        reason = "this build of flash_kda has no CUDA kernels"
        if found["cuda_archs"]:
            reason = f"no usable GPU: {found['cuda_status']}"
        assert backend._why_no_device("cuda") == reason
    assert_left(run(moved(small(), "meta"), **V_FIRST), "q is on meta, wanted cpu or cuda")


def test_import_with_a_wrong_switch():
    status, error = import_it("0", FLASH_KDA_FLA="yes")
    assert status != 0 and error == "ValueError: FLASH_KDA_FLA: 'yes', wanted 0 or 1"


def test_without_dispatch_nothing_is_served():
    call = {**SMALL, "call": {"state_v_first": True}}
    result = run_elsewhere(call, FLA_DISABLE_BACKEND_DISPATCH="1")
    assert result["served"] == [] and result["calls"] == [] and result["log"] == []


@pytest.mark.slow
@pytest.mark.parametrize("option", ["state_v_first", "transpose_state_layout"])
@pytest.mark.parametrize("release", ["0.5.0", "0.5.2"])
def test_older_releases(release, option, install):
    """Their chunk_kda is served under both names; their fused_recurrent_kda asks nobody."""
    path = [install(f"fla-core=={release}"), install("triton==3.5.1")]
    softplus = {option: True, "lower_bound": None, "safe_gate": False}
    result = run_elsewhere({**SMALL, "call": softplus}, path)
    assert (result["fla-core"], result["triton"]) == (release, "3.5.1")
    assert result["served"] == ["chunk_kda"]
    assert result["warnings"] == [
        f"flash_kda.fla: fused_recurrent_kda of fla-core {release} asks no backend and stays "
        "with Triton, wanted 0.6.0 or newer"
    ]
    assert result["error"] is None and result["calls"] == ["fwd"]
    assert result["kernel"].startswith("cpu/")
    assert result["ratio_out"] < 2.5e-3 and result["ratio_final"] < 1e-5
    call = {**SMALL, "T": 1, "function": "fused_recurrent_kda", "call": {option: True}}
    assert run_elsewhere(call, path)["calls"] == []
