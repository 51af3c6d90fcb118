"""caller_cases.py on CUDA tensors: the calls of SGLang and vLLM."""

import pytest

pytest.importorskip("torch")
pytest.register_assert_rewrite("caller_cases")

from caller_cases import *  # noqa: F403
from on_gpu import DEVICE


@pytest.fixture
def device():
    return DEVICE
