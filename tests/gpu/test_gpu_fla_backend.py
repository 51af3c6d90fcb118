"""flash_kda.fla on CUDA tensors: the tests of tests/python/fla_cases.py."""

import pytest

pytest.importorskip("fla", reason="flash-linear-attention (fla-core) is not installed")
pytest.register_assert_rewrite("fla_cases")

from fla_cases import *  # noqa: F403
from on_gpu import DEVICE


@pytest.fixture
def device():
    return DEVICE
