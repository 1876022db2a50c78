"""Norms of weights, gradients and updates by layer, on any layout."""

import math
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from llm.data.loader import StepBatch
from llm.extensions.norms.attention_logits import measure_attention_logits
from llm.optim.groups import embeddings_and_head, output_head
from llm.parallel.base import AcceleratedStrategy
from llm.runtime.agreement import gather
from llm.trainers.gpt.seams import LoopExtension, Periodic

KINDS = "norm_weight", "norm_gradient", "norm_update"
"""Names of the norms: of weights after the step, of gradients before clipping, and of the change of
the weights by the step."""

_LAYER = re.compile(r"(?:^|\.)(\d+)\.")


class NormRecords(LoopExtension):
    """Measures norms every few steps; they stay on the device until the step is logged.

    Each shard of a weight counts once: a rank divides its squares by the number of ranks with the
    same shard, and squares are summed over all ranks.

    Args:
        strategy: The model and its optimizer; every rank must call this.
        interval_steps: Steps between two records.
        has_several_models: Whether ranks have separate weights; then norms are over the mean of
            their squares.
    """

    part, description = "norms", "unreported norms"

    def __init__(
        self, strategy: AcceleratedStrategy, *, interval_steps: int, has_several_models: bool
    ) -> None:
        self._strategy, self._interval_steps = strategy, interval_steps
        self.periodic = Periodic("norms", interval_steps, self._report)
        self.before_update = self._measure_gradients
        name_by_param: dict[Tensor, str] = {
            parameter: name for name, parameter in strategy.model.named_parameters()
        }
        names = [name_by_param[p] for p in strategy.parameters]
        group_by_name = _gather_groups(strategy.model, names)
        num_copies, is_replicated = _count_copies(names, strategy)
        self._needs_reduction = has_several_models or not is_replicated
        self.groups = sorted({*group_by_name.values()}, key=_group_order)
        device = strategy.device
        self._group_indices = torch.tensor(
            [self.groups.index(group_by_name[name]) for name in names], device=device
        )
        fractions = [1 / count if self._needs_reduction else 1.0 for count in num_copies]
        self._fractions = torch.tensor(fractions, device=device)
        self._layer_by_module = _find_layers(strategy.model)
        layer_indices = [int(group.partition(".")[0]) for group in self.groups if "." in group]
        self._num_layers = 1 + max(layer_indices, default=-1)
        self._is_due = False
        self._previous_weights: list[Tensor] = []
        self._gradient_squares = torch.zeros(len(self.groups), device=device)
        self._record: dict[str, float] = {}
        self._norms: Tensor | None = None
        self._logits: Tensor | None = None

    def before_step(self, step: int) -> None:
        """Decide whether to measure this step."""
        self._is_due = (step + 1) % self._interval_steps == 0

    @torch.no_grad()
    def _measure_gradients(self) -> None:
        """Measure the gradients, and keep the weights, if this step is due."""
        if not self._is_due:
            return
        parameters = self._strategy.local_parameters
        self._gradient_squares = self._sum_group_squares([p.grad for p in parameters])
        self._previous_weights = [p.detach().clone() for p in parameters]

    @torch.no_grad()
    def after_step(self, step: int, batch: StepBatch) -> None:
        """Measure the weights, their change, and the attention logits of the first micro-batch."""
        if not self._is_due:
            return
        weights = [p.detach() for p in self._strategy.local_parameters]
        updates = self._previous_weights
        torch._foreach_sub_(updates, weights)
        weight_squares, update_squares = map(self._sum_group_squares, (weights, updates))
        squares = torch.stack([weight_squares, self._gradient_squares, update_squares])
        self._previous_weights = []
        logits = measure_attention_logits(
            self._strategy,
            batch.micro_batches[0],
            layers=self._layer_by_module,
            num_layers=self._num_layers,
        )
        if self._needs_reduction:
            dist.all_reduce(squares)
        if self._strategy.world_size > 1:
            dist.all_reduce(logits, dist.ReduceOp.MAX)
        self._norms, self._logits = squares.sqrt(), logits

    def _sum_group_squares(self, tensors: Sequence[Tensor | None]) -> Tensor:
        """Return the sum of squares of each group, of this rank's share; None counts as zeros."""
        zero = torch.zeros((), device=self._strategy.device)
        norms = iter(torch._foreach_norm([t for t in tensors if t is not None]))
        tensor_norms = torch.stack(
            [zero if tensor is None else next(norms).float() for tensor in tensors]
        )
        squares = torch.zeros(len(self.groups), device=zero.device)
        return squares.index_add_(0, self._group_indices, tensor_norms.square() * self._fractions)

    def _report(self, step: int) -> dict[str, float]:
        """Return the record of this step; the host has read the loss, so it does not wait."""
        record = self._read_record()
        self._norms, self._record = None, {}
        return record

    def _read_record(self) -> dict[str, float]:
        """Return the values that were not reported yet by name; empty if none are left."""
        if self._norms is None or self._logits is None:
            return self._record
        record = {
            f"{kind}/{group}": norm
            for kind, norms in zip(KINDS, self._norms.tolist(), strict=True)
            for group, norm in zip(self.groups, norms, strict=True)
        }
        logits = enumerate(self._logits.tolist())
        return record | {
            f"max_attention_logit/{layer}": logit for layer, logit in logits if logit != -math.inf
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the record that a stop leaves for the next start to report."""
        return {"record": self._read_record()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the record that the last start did not report."""
        self._norms, self._record = None, dict(state["record"])


def _gather_groups(model: nn.Module, names: Sequence[str]) -> dict[str, str]:
    """Return the group of each parameter on any rank by name; every rank must call it."""
    group_by_name: dict[str, str] = {}
    for rank_groups in gather(_group_parameters(model, names)):
        # A tied weight is an embedding on the first stage, and only a head on the last one.
        group_by_name = rank_groups | group_by_name
    return group_by_name


def _count_copies(names: Sequence[str], strategy: AcceleratedStrategy) -> tuple[list[int], bool]:
    """Count the ranks with the same shard of each parameter; every rank must call it.

    Returns:
        The number of ranks for each parameter, and whether every rank has all parameters whole.
    """
    shards = [
        [name, *_shard_coordinates(p)] for name, p in zip(names, strategy.parameters, strict=True)
    ]
    counts = Counter(tuple(shard) for rank_shards in gather(shards) for shard in rank_shards)
    is_replicated = all(count >= strategy.world_size for count in counts.values())
    return [counts[tuple(shard)] for shard in shards], is_replicated


def _group_parameters(model: nn.Module, names: Sequence[str]) -> dict[str, str]:
    """Return the group of each parameter by name.

    It is `embedding`, `head`, `3.attention`, `3.mlp` or `3.norms` with the number of a layer, and
    `other` elsewhere, such as the gain of the last norm.
    """
    parameters, head = dict(model.named_parameters()), output_head(model)
    head_weight = getattr(head, "weight", None)
    embeddings = {module.weight for module in model.modules() if isinstance(module, nn.Embedding)}
    end_weights = embeddings_and_head(model)
    group_by_name = {}
    for name in names:
        match, parameter = _LAYER.search(name), parameters[name]
        if parameter in end_weights:
            is_head = parameter is head_weight and parameter not in embeddings
            group_by_name[name] = "head" if is_head else "embedding"
        elif match is None:
            group_by_name[name] = "other"
        else:
            group_by_name[name] = f"{match[1]}.{_classify_path(name[match.end() :])}"
    return group_by_name


def _classify_path(path: str) -> str:
    """Return whether a parameter inside a layer belongs to attention, to norms or to the MLP."""
    modules = path.split(".")[:-1]
    norms = [module for module in modules if "norm" in module or module.startswith("ln")]
    if any("attn" in module or "attention" in module for module in modules if module not in norms):
        return "attention"
    return "norms" if norms else "mlp"


def _group_order(group: str) -> tuple[int, int, str]:
    """Return the place of a group: the embedding, layers by number, the others, and the head."""
    layer, _, kind = group.rpartition(".")
    if layer:
        return 1, int(layer), kind
    return {"embedding": 0, "other": 2, "head": 3}[group], 0, group


def _shard_coordinates(parameter: Tensor) -> list[int]:
    """Return the index of this rank's shard on each axis of the mesh; -1 on axes of replicas."""
    if not isinstance(parameter, DTensor):
        return []
    coordinates = parameter.device_mesh.get_coordinate() or ()
    return [
        -1 if placement.is_replicate() else coordinate
        for coordinate, placement in zip(coordinates, parameter.placements, strict=True)
    ]


def _find_layers(model: nn.Module) -> dict[nn.Module, int]:
    """Return the index of the layer of each module inside a layer."""
    matches = ((module, _LAYER.search(f"{name}.")) for name, module in model.named_modules())
    return {module: int(match[1]) for module, match in matches if match is not None}
