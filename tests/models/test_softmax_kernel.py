"""The Triton kernel of the loss in Triton's interpreter, which needs no GPU."""

import importlib.util
import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from llm.models.cross_entropy import _softmax_losses

VOCABULARY = 4200
"""Of 4,224 columns, which are more than two blocks; the last ones are padding."""


def chunk(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(5, 4224, generator=generator)
    logits[2, 17] = -torch.inf
    labels = torch.tensor([7, -100, 4199, 0, 2048])
    return logits.to(dtype), labels


def compare(dtype: torch.dtype, z_loss: float, with_gradient: bool) -> None:
    from llm.models.softmax_kernel import softmax_in_place

    options = VOCABULARY, with_gradient, z_loss
    found = softmax_in_place(*chunk(dtype), *options)
    expected = _softmax_losses(None, *chunk(dtype), *options)
    for one, other in zip(found, expected, strict=True):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            torch.testing.assert_close(one, other, rtol=1e-5 if one.ndim == 1 else 2e-3, atol=1e-6)


@pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="needs Triton, which comes with CUDA builds"
)
def test_the_kernel_computes_what_the_operations_compute():
    # Triton reads the variable when it is imported.
    done = subprocess.run(
        [sys.executable, "-m", "tests.models.test_softmax_kernel"],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.returncode == 0, done.stderr


if __name__ == "__main__":
    for case in itertools.product((torch.float32, torch.float16), (0.0, 1e-2), (True, False)):
        compare(*case)
