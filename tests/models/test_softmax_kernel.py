"""The Triton kernel of the loss in Triton's interpreter, which needs no GPU."""

import importlib.util
import itertools
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from llm.models.cross_entropy import Softmax, _compute_softmax_losses, chunked_cross_entropy

NO_TRITON = "needs Triton, which comes with CUDA builds and with the extra `dev`"
VOCABULARY = 4200
"""Of 4,224 columns, which are more than two blocks; the last ones are padding."""


def chunk(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(5, 4224, generator=generator)
    logits[2, 17] = -torch.inf
    labels = torch.tensor([7, -100, 4199, 0, 2048])
    return logits.to(dtype), labels


def compare(
    dtype: torch.dtype, z_loss: float, with_gradient: bool, num_programs: int | None
) -> None:
    from llm.models.softmax_kernel import softmax_in_place

    options = VOCABULARY, with_gradient, z_loss
    found = softmax_in_place(*chunk(dtype), *options, num_programs)
    expected = _compute_softmax_losses(None, *chunk(dtype), *options)
    if expected[2] is not None:
        expected[2][1] = 0  # the row without a label, which the kernel zeroes
    for one, other in zip(found, expected, strict=True):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            torch.testing.assert_close(one, other, rtol=1e-5 if one.ndim == 1 else 2e-3, atol=1e-6)


def compare_gradients(num_programs: int | None) -> None:
    """The loss with the kernel, without masks of its own, against torch's operations."""
    from llm.models.softmax_kernel import softmax_in_place

    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(11, 24, generator=generator)
    weight = torch.randn(300, 24, generator=generator)
    labels = torch.tensor([5, -100, 299, 0, 7, -100, 1, 2, 3, 4, 128])

    def gradients(softmax: Softmax | None, dtype: torch.dtype) -> list[Tensor]:
        inputs = [tensor.to(dtype).requires_grad_() for tensor in (hidden, weight)]
        loss, _ = chunked_cross_entropy(
            *inputs, None, labels, vocab_size=300, chunk_rows=4, softmax=softmax, z_loss=1e-2
        )
        (loss / 7).backward()
        return [loss.detach(), *(tensor.grad for tensor in inputs if tensor.grad is not None)]

    kernel = partial(softmax_in_place, num_programs=num_programs)
    found, expected = gradients(kernel, torch.float32), gradients(None, torch.float32)
    assert len(found) == 3
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_few_programs_are_chosen_where_the_cache_holds_their_rows(monkeypatch):
    pytest.importorskip("triton", reason=NO_TRITON)
    from llm.models.softmax_kernel import choose_softmax, softmax_in_place

    def programs(cache_mib: int, multiprocessors: int, columns: int) -> int | None:
        card = SimpleNamespace(multi_processor_count=multiprocessors, L2_cache_size=cache_mib << 20)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
        softmax = choose_softmax(torch.device("cuda"), columns)
        return None if softmax is softmax_in_place else softmax.keywords["num_programs"]

    assert programs(50, 132, 50304) == 264  # an H100: two for each multiprocessor
    assert programs(50, 132, 100352) == 132  # cl100k's vocabulary: one
    assert programs(50, 132, 128256) is None  # Llama 3's: not one row for each multiprocessor
    assert programs(6, 80, 50304) is None  # a V100: one for each row, which is read twice


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason=NO_TRITON)
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
    dtypes = torch.float32, torch.float16
    for case in itertools.product(dtypes, (0.0, 1e-2), (True, False), (None, 2)):
        compare(*case)
    for num_programs in (None, 2):
        compare_gradients(num_programs)
