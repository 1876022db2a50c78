"""Skips the tests of this folder where their device is missing."""

import pytest
import torch

from tests.gpu.device import DEVICE


@pytest.fixture(scope="module", autouse=True)
def device() -> None:
    if DEVICE.type == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device; LLM_TEST_DEVICE=cpu rehearses these tests on a CPU")
