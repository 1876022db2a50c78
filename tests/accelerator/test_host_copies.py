"""Copies of a GPU's tensors to the host, which end when the program waits for their stream.

A tensor of the host stands in for one of the GPU.
"""

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from llm.checkpoint.snapshot import copy_to_host

begun: list[Callable[[], None]] = []  # copies that have not ended


class OnGPU(torch.Tensor):
    """A tensor whose copies to the host without a wait are only begun."""

    is_cuda = True

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is not torch.Tensor.copy_ or not (kwargs or {}).get("non_blocking"):
            return super().__torch_function__(func, types, args, kwargs or {})
        target, source = args
        begun.append(lambda: target.copy_(source.as_subclass(torch.Tensor)))
        return target


def wait_for_copies() -> None:
    for copy in begun:
        copy()
    begun.clear()


@pytest.fixture
def stream(monkeypatch):
    stream = SimpleNamespace(synchronize=wait_for_copies)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    yield stream
    begun.clear()


def copy_and_train() -> list[float]:
    weights = torch.tensor([1.0, 2.0]).as_subclass(OnGPU)
    buffers = {"weights": torch.zeros(2)}  # pinned memory exists on a GPU only
    copies = copy_to_host({"weights": weights}, buffers)
    weights.add_(10.0)  # the next step
    wait_for_copies()
    return copies["weights"].tolist()


def test_a_snapshot_has_the_values_from_before_the_next_step(stream):
    assert copy_and_train() == [1.0, 2.0]


def test_a_snapshot_that_is_not_waited_for_has_those_of_the_next_step(stream):
    stream.synchronize = lambda: None
    assert copy_and_train() == [11.0, 12.0]
