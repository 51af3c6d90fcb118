"""caller_cases.py on CPU tensors: the calls of SGLang and vLLM."""

import pytest

pytest.importorskip("torch")
pytest.register_assert_rewrite("caller_cases")

from caller_cases import *  # noqa: F403


@pytest.fixture
def device():
    return "cpu"
