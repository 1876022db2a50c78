"""Dropout on what each rank computes for itself, beside dropout on what all ranks have alike.

Ranks that compute a layer together draw the same random numbers, so that one mask falls on the
activations that all of them hold. Each rank's own heads want masks of their own.
"""

import hashlib
from typing import Any

import torch
from torch import nn


class OwnRandomness:
    """Numbers that no other rank draws, between two points of a forward pass.

    They follow from the common generator's state alone, so that recomputed activations get the
    masks that they had.

    Args:
        device: Where the random numbers are drawn; an accelerator with its index.
        rank: Tells this rank's numbers from those of its peers.
    """

    def __init__(self, device: torch.device, rank: int) -> None:
        self._device = device
        self._rank = rank
        self._seed: int | None = None
        self._common: torch.Tensor | None = None

    def begin_after(self, module: nn.Module) -> None:
        """Draw own numbers once this module has made the rank's own activations."""
        module.register_forward_hook(lambda module, *_: self._begin() if module.training else None)

    def end_before(self, module: nn.Module) -> None:
        """Draw the common numbers again when this module begins."""
        module.register_forward_pre_hook(lambda *_: self._end())

    def _begin(self) -> None:
        # A graph that torch.compile traces has no generator to change.
        if torch.compiler.is_compiling() or self._is_own():
            return
        torch.rand((), device=self._device)  # no two stretches begin alike
        generator = self._generator()
        self._common = generator.get_state()
        start = self._common.numpy().tobytes() + self._rank.to_bytes(8)
        self._seed = int.from_bytes(hashlib.sha256(start).digest()[:8]) >> 1
        generator.manual_seed(self._seed)

    def _end(self) -> None:
        if not torch.compiler.is_compiling() and self._is_own():
            assert self._common is not None
            self._generator().set_state(self._common)

    def _is_own(self) -> bool:
        # Asked of the generator, since recomputation may stop in the middle and restore it.
        return bool(self._generator().initial_seed() == self._seed)

    def _generator(self) -> Any:
        if self._device.type == "cpu":
            return torch.default_generator
        return torch.get_device_module(self._device).default_generators[self._device.index]


def has_attention_dropout(config: dict[str, Any]) -> bool:
    """Whether a model's configuration asks for dropout on attention probabilities."""
    return any("att" in name and "drop" in name and value for name, value in config.items())
