"""Memory of the optimizer, found by making it on the meta device."""

import contextlib
import dataclasses
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

from llm.optim.kfac.curvature import Curvature
from llm.optim.kfac.make_kfac import make_kfac
from llm.optim.make import make_optimizer
from llm.plan.options import PlanOptions
from llm.plan.param_counts import FP32


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerMemory:
    """What an optimizer keeps.

    Attributes:
        per_element: Bytes of optimizer state for each trained element.
        kfac: Bytes of K-FAC's factors and bases on one rank.
        kfac_recording: Bytes that it takes while a step is computed whose tokens it records.
        kfac_step: Bytes that it takes while the optimizer steps.
    """

    per_element: float
    kfac: int = 0
    kfac_recording: int = 0
    kfac_step: int = 0


def optimizer_memory(options: PlanOptions, model: PreTrainedModel) -> OptimizerMemory:
    """Make the optimizer as the trainer does and count what it holds."""
    if not options.kfac:
        accum_steps = (options.accum_steps or 1) if options.optimizer == "accumadamw" else None
        optimizer = make_optimizer(options, model, accum_steps=accum_steps)
        return OptimizerMemory(per_element=_per_element(optimizer, model))
    with fake_ranks(options.nodes * options.gpus_per_node):
        kfac = make_kfac(options, model, torch_compile=options.torch_compile)
    curvature = kfac.recorder
    assert isinstance(curvature, Curvature)  # `check` refuses the library
    # In a step in which all factors are due, as in the first.
    sums = FP32 * sum(width**2 for factor in curvature.factors for width in factor.widths)
    return OptimizerMemory(
        per_element=_per_element(kfac.optimizer, model),
        kfac=curvature.num_bytes(),
        kfac_recording=sums,
        kfac_step=sums + FP32 * curvature.coverage.num_covered,
    )


def _per_element(optimizer: torch.optim.Optimizer, model: nn.Module) -> float:
    """Bytes of optimizer state for each trained element."""
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    leaves = tree_leaves(list(optimizer.state.values()))
    tensors = {leaf for leaf in leaves if isinstance(leaf, torch.Tensor)}
    return sum(tensor.nbytes for tensor in tensors) / trained


@contextlib.contextmanager
def fake_ranks(world_size: int) -> Iterator[None]:
    """Pretend to be rank 0 of `world_size` ranks: collectives return at once."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()
