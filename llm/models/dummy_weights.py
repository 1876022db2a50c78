"""Models on the meta device: copies without weights, and weights that take next to no memory.

Some properties of a model show best in what it computes: whether its stages do together what the
whole does, whether documents stay apart. They do not depend on which weights it has.
"""

import copy
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel


def without_weights(model: PreTrainedModel) -> PreTrainedModel:
    """A copy of a model on the meta device, which tells sizes and names and takes no memory."""
    tensors = itertools.chain(model.named_parameters(), model.named_buffers())
    bare: dict[int, Any] = {}
    for _, tensor in tensors:
        meta = tensor.detach().to("meta")
        if isinstance(tensor, nn.Parameter):
            meta = nn.Parameter(meta, requires_grad=tensor.requires_grad)
        bare[id(tensor)] = meta
    # Pre-seeded memo entries are reused, which keeps tied weights tied.
    return copy.deepcopy(model, bare)


@contextmanager
def dummy_weights(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Let what a model has on the meta device be made up inside; afterwards it is as before.

    Entry (i, j) of a matrix is number i + j of one row of random numbers, so that it takes no more
    memory than its two sides. A stack of matrices, such as a layer's experts, repeats one, since
    kernels for stacks want every matrix laid out; layers share it. All ranks make up the same.

    Args:
        model: A model, or what contains one; tied parameters stay tied.
        device: Where it shall compute.
    """
    values = _Values(device)
    made: dict[Tensor, Tensor] = {}
    places: list[tuple[dict[str, Any], str, Tensor]] = []
    for module in model.modules():
        held: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        for tensors in held:
            for name, tensor in tensors.items():
                if tensor is not None and tensor.is_meta:
                    if tensor not in made:
                        made[tensor] = values.of(tensor)
                    places.append((tensors, name, tensor))
    for tensors, name, tensor in places:
        tensors[name] = made[tensor]
    try:
        yield
    finally:
        for tensors, name, tensor in places:
            tensors[name] = tensor


class _Values:
    """Random numbers that let a signal pass through many layers."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._generator = torch.Generator().manual_seed(0)
        self._matrices: dict[torch.Size, Tensor] = {}

    def of(self, tensor: Tensor) -> Tensor:
        """Made-up values for a parameter or buffer."""
        if not tensor.is_floating_point():  # a mask that hides nothing, or indices
            return tensor.new_full(tensor.shape, tensor.dtype == torch.bool, device=self._device)
        if not isinstance(tensor, nn.Parameter):  # rotary frequencies, for instance
            row = torch.rand(sum(tensor.shape) + 1, generator=self._generator)
            return self._spread(row, tensor)
        if tensor.ndim < 2:
            values = self._spread(1 + 0.1 * self._row(tensor.numel()), tensor)
        elif tensor.ndim == 2:
            row = self._row(sum(tensor.shape)) / max(tensor.shape) ** 0.5
            values = self._spread(row, tensor)
        else:
            values = self._matrix(tensor.shape[-2:]).to(tensor.dtype).expand(tensor.shape)
        return nn.Parameter(values, requires_grad=tensor.requires_grad)

    def _row(self, length: int) -> Tensor:
        return torch.randn(length, generator=self._generator)

    def _spread(self, row: Tensor, tensor: Tensor) -> Tensor:
        # On the device first: moving a view would lay it out.
        row = row.to(self._device, tensor.dtype)
        return row.as_strided(tensor.shape, (1,) * tensor.ndim)

    def _matrix(self, shape: torch.Size) -> Tensor:
        if shape not in self._matrices:
            row = self._row(sum(shape)) / max(shape) ** 0.5
            laid_out = row.as_strided(shape, (1, 1)).contiguous()
            self._matrices[shape] = laid_out.to(self._device)
        return self._matrices[shape]
