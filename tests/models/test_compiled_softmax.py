"""The softmax of the loss as Inductor compiles it: what it computes, and what it stores."""

import math
import re
import shutil

import pytest
import torch
from torch import Tensor
from torch._inductor.utils import run_and_get_code

from llm.models.compilation import compile_for_fixed_shapes
from llm.models.cross_entropy import _softmax

pytestmark = pytest.mark.skipif(
    shutil.which("g++") is None, reason="torch.compile needs a C++ compiler"
)

ROWS, COLUMNS, VOCABULARY = 32, 384, 300


def chunk(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(ROWS, COLUMNS, generator=generator).to(dtype)
    labels = torch.randint(VOCABULARY, (ROWS,), generator=generator)
    labels[3] = -100
    return logits, labels


def stored_matrices(code: str) -> list[str]:
    """Types of the buffers of [rows, columns] that the generated code allocates."""
    buffers = re.findall(r"= \S*empty\w*\(\(([\d, ]+)\).*torch\.(\w+)", code)
    sizes = [(math.prod(map(int, re.findall(r"\d+", shape))), dtype) for shape, dtype in buffers]
    return [dtype for size, dtype in sizes if size == ROWS * COLUMNS]


@pytest.mark.parametrize(
    ("dtype", "z_loss"),
    [
        pytest.param(torch.bfloat16, 0.0, marks=pytest.mark.slow),
        (torch.bfloat16, 1e-2),
        pytest.param(torch.float32, 0.0, marks=pytest.mark.slow),
        pytest.param(torch.float32, 1e-2, marks=pytest.mark.slow),
    ],
)
def test_it_stores_the_gradient_and_no_probabilities(dtype: torch.dtype, z_loss: float) -> None:
    logits, labels = chunk(dtype)
    arguments = labels, VOCABULARY, None, True, z_loss
    expected = _softmax(logits.clone(), *arguments)

    compiled, [code] = run_and_get_code(
        compile_for_fixed_shapes(_softmax), logits.clone(), *arguments
    )

    for one, other in zip(compiled, expected, strict=True):
        torch.testing.assert_close(one, other)
    assert stored_matrices(code) == [str(dtype).removeprefix("torch.")]
