"""flash-linear-attention by itself, on CUDA tensors, runs on our kernel, and proves it.

FLA falls back to its own Triton kernels without an error, so every call is counted by a wrapper
around flash_kda.fwd and confirmed by the library's own report.
"""

import pytest

pytest.importorskip("fla", reason="flash-linear-attention (fla-core) is not installed")

import torch
from fla_driver import make_inputs, ratio, reference, run
from on_gpu import DEVICE, KERNELS

ACCEPTED = "[FLA Backend] fla.ops.kda.chunk.chunk_kda -> flash_kda"
BOUND = 0.006  # FLA's own acceptance: RMS(error) / RMS(reference)


pytestmark = pytest.mark.usefixtures("path")


@pytest.fixture(autouse=True)
def fla_by_itself(monkeypatch):
    monkeypatch.setenv("FLASH_KDA_FLA", "0")  # should another test have imported flash_kda.fla


def on_device(inputs):
    return {name: x.to(DEVICE) if isinstance(x, torch.Tensor) else x for name, x in inputs.items()}


@pytest.mark.parametrize(
    "B, T, H, cu",
    [
        (1, 1024, 4, None),
        (2, 2048, 8, None),
        (1, 1000, 4, [0, 256, 500, 1000]),
        (1, 2000, 8, [0, 100, 300, 1200, 2000]),
    ],
)
def test_chunk_kda_dispatches_to_us(B, T, H, cu, path):
    inputs = make_inputs(B, T, H, cu)
    result = run(on_device(inputs), state_v_first=True)
    assert result["error"] is None
    assert result["calls"] == ["fwd"]
    assert result["kernel"].startswith(KERNELS[path])
    assert ACCEPTED in result["log"]
    out, final = reference(inputs)
    assert ratio(result["out"].cpu(), out) < BOUND
    assert ratio(result["final"].cpu(), final) < BOUND
