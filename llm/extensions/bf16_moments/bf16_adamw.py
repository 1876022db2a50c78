"""AdamW with bf16 moments, rounded stochastically.

The nearest bf16 number to a moment is usually the one before: beta2 = 0.999 changes the second
moment by a thousandth, and bf16 resolves a 256th. Rounded up or down at random, with probabilities
that keep the mean, small changes add up (Gupta et al. 2015, arXiv:1502.02551; for bf16 Zamirai et
al. 2020, arXiv:2010.06192).

The random bits are a function of the seed, the parameter's name, its number of updates and the
element, computed from tensors of integers. So resuming is exact without a generator's state, the
step count stays on the device, and ranks that hold the same weights round alike.
"""

import hashlib
import itertools
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from llm.optim.adamw_and_sgd import adamw_settings, adamw_state, adamw_step
from llm.optim.groups import parameter_groups
from llm.optim.options import OptimizerOptions

_SLICE_SIZE = 2**22
"""Elements updated at once; takes 64 MiB for float32 moments and random bits."""

_CPU_SLICE_SIZE = 2**18
"""Elements updated at once on a CPU, which has caches for 4 MiB."""

_ELEMENT_STRIDE, _UPDATE_STRIDE = 0x9E3779B1, 0x85EBCA77
"""Strides of elements and updates in a cycle of 2**32 numbers; odd, to reach all of them."""

_HASH_STEPS = ((16, 0x7FEB352D), (15, 0x846CA68B))
"""Shifts and factors of the hash lowbias32 (C. Wellons 2018)."""


class BF16AdamW(torch.optim.Optimizer):
    """AdamW (Loshchilov & Hutter 2019, arXiv:1711.05101) with moments of matrices in bf16.

    torch's fused kernel updates float32 copies of the moments, a slice of a matrix at a time. The
    moments of vectors, a thousandth of all, stay float32. Like torch's fused optimizers, `step`
    reads the attribute `found_inf`: if it is 1, weights and state do not change.

    Args:
        params: Groups of parameters, each with `keys`: an integer for each of its parameters, from
            which the random bits follow.
        compiled: Round in one compiled kernel instead of 30, with the same results.
        settings: lr, betas and eps, for all groups.
    """

    found_inf: Tensor | None = None

    def __init__(self, params: Any, *, compiled: bool = False, **settings: Any) -> None:
        super().__init__(params, settings)
        # One graph for all sizes.
        self._round_moments = (
            torch.compile(round_moments, dynamic=True) if compiled else round_moments
        )
        for p in itertools.chain(*(group["params"] for group in self.param_groups)):
            # Created here and not in the first step, so that a checkpoint can be loaded.
            state = adamw_state(p)
            if p.ndim > 1:
                for name in ("exp_avg", "exp_avg_sq"):
                    state[name] = state[name].to(torch.bfloat16)
            self.state[p] = state

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            float32_params = []
            for p, key in zip(group["params"], group["keys"], strict=True):
                if self.state[p]["exp_avg"].dtype == torch.float32:
                    float32_params.append(p)
                elif p.grad is not None:
                    self._update_parameter(p, key, group)
            adamw_step(group, float32_params, self.state, self.found_inf)

    def _update_parameter(self, parameter: Tensor, random_key: int, group: dict[str, Any]) -> None:
        """Update a parameter slice by slice, so that few float32 moments are in memory at once.

        Args:
            parameter: The parameter; it has a gradient.
            random_key: Key of the random bits that round its moments.
            group: Its parameter group.
        """
        assert parameter.grad is not None
        num_updates, *moments = (
            self.state[parameter][name] for name in ("step", "exp_avg", "exp_avg_sq")
        )
        slice_size = _CPU_SLICE_SIZE if parameter.device.type == "cpu" else _SLICE_SIZE
        for first_element in range(0, parameter.numel(), slice_size):
            slice_elements = slice(first_element, first_element + slice_size)
            param_slice = parameter.detach().view(-1)[slice_elements]
            param_slice.grad = parameter.grad.reshape(-1)[slice_elements]
            bf16_moments = [moment.view(-1)[slice_elements] for moment in moments]
            exp_avg, exp_avg_sq = (moment.float() for moment in bf16_moments)
            state = {"step": num_updates.clone(), "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
            adamw_step(group, [param_slice], {param_slice: state}, self.found_inf)
            first_counter = torch.tensor(
                _as_int32(random_key + first_element * _ELEMENT_STRIDE), dtype=torch.int32
            )
            self._round_moments(bf16_moments, [exp_avg, exp_avg_sq], num_updates, first_counter)
        num_updates += 1.0 if self.found_inf is None else 1.0 - self.found_inf


def round_moments(
    bf16_moments: list[Tensor], moments: list[Tensor], num_updates: Tensor, first_counter: Tensor
) -> None:
    """Write a slice of a parameter's float32 moments into the bf16 ones, rounded stochastically.

    Args:
        bf16_moments: First and second moment, bf16 [size]; overwritten.
        moments: The new moments in float32 [size]. After a skipped step they are bf16 numbers
            already, which rounding does not change.
        num_updates: Number of updates before this one, on the device.
        first_counter: Selects the random bits, as for `draw_random_bits`.
    """
    bits = draw_random_bits(num_updates, first_counter, size=len(moments[0]))
    bf16_moments[0].copy_(round_stochastically(moments[0], bits & 0xFFFF))
    bf16_moments[1].copy_(round_stochastically(moments[1], (bits >> 16) & 0xFFFF))


def draw_random_bits(num_updates: Tensor, first_counter: Tensor, *, size: int) -> Tensor:
    """Return random integers, int32 [size]: a function of all arguments but the size.

    Args:
        num_updates: Number of updates before this one, on the device.
        first_counter: Input of the hash for the first element: the parameter's key plus
            `_ELEMENT_STRIDE` times the index of the element, an int32 on the host. With an integer
            of Python, Triton would compute in 64 bits.
        size: Number of elements.
    """
    # int32 wraps around, and so has the products of uint32; torch has fewer kernels for uint32.
    bits = torch.arange(size, dtype=torch.int32, device=num_updates.device)
    bits *= _as_int32(_ELEMENT_STRIDE)
    bits += num_updates.to(torch.int32) * _as_int32(_UPDATE_STRIDE) + first_counter
    for shift, factor in _HASH_STEPS:
        bits ^= (bits >> shift) & (2 ** (32 - shift) - 1)  # `>>` repeats the sign
        bits *= _as_int32(factor)
    return bits


def round_stochastically(values: Tensor, bits: Tensor) -> Tensor:
    """Round to bf16, away from zero with the probability that keeps the mean; returns float32.

    Args:
        values: Float32, finite.
        bits: Random integers from 0 to 2**16 - 1, int32 of the same shape.
    """
    # bf16 is float32 without its last 16 bits: their sum with 16 random ones carries, or not.
    return ((values.view(torch.int32) + bits) & -0x10000).view(torch.float32)


def make_bf16_adamw(
    options: OptimizerOptions, model: torch.nn.Module, *, seed: int = 0, compiled: bool = False
) -> BF16AdamW:
    """Make AdamW with moments in bf16.

    Args:
        options: Learning rate, decay rates, epsilon and weight decay.
        model: The model to train.
        seed: The run's seed, for the rounding.
        compiled: Round in a compiled kernel.
    """
    names = {parameter: name for name, parameter in model.named_parameters()}
    groups = parameter_groups(options, model)
    for group in groups:
        group["keys"] = [_make_random_key(seed, names[p], p) for p in group["params"]]
    return BF16AdamW(groups, compiled=compiled, **adamw_settings(options))


def _make_random_key(seed: int, name: str, parameter: Tensor) -> int:
    """Return the key of a parameter, or of this rank's shard of it.

    A shard of rows continues at its place in the whole parameter, so that its elements have the
    random bits that they have on one rank.
    """
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=4).digest()
    key = int.from_bytes(digest, "little")
    if isinstance(parameter, DTensor):
        _, offsets = compute_local_shape_and_global_offset(
            parameter.shape, parameter.device_mesh, parameter.placements
        )
        first_element = sum(
            offset * stride for offset, stride in zip(offsets, parameter.stride(), strict=True)
        )
        key += first_element * _ELEMENT_STRIDE
    return key


def _as_int32(number: int) -> int:
    """Return the int32 that has the last 32 bits of an integer."""
    return (number + 2**31) % 2**32 - 2**31
