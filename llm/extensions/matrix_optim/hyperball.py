"""Hyperball: matrices keep the norm of their initial values, around the step of any optimizer."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from llm.errors import ConfigError
from llm.extensions.matrix_optim.fused import Fusion
from llm.extensions.matrix_optim.matrix_factories import (
    FP32,
    MatrixRunOptimizer,
    make_matrix_owners,
)
from llm.extensions.matrix_optim.matrix_owners import MatrixOwners, groups_of
from llm.extensions.matrix_optim.matrix_settings import MatrixSettings
from llm.extensions.matrix_optim.muon import find_layer_matrices
from llm.optim.groups import embedding_settings, split_groups
from llm.optim.run_optimizer import MatrixTraffic, OptimizerFactory, RunOptimizer, StateMemory
from llm.runtime.float32 import sums_dtype


class _WeightShard(NamedTuple):
    """The matrices of a weight, and this rank's shard of them.

    Attributes:
        input_dim: The weight's dimension of inputs.
        stack: Which matrices of a stack this rank has a part of; all of them for a single weight.
        membership: [outputs of the shard, matrices side by side]: 1.0 where an output belongs to a
            matrix, else 0.0.
        is_counted: Whether this rank adds its shard to sums; another rank may have the same one.
    """

    input_dim: int
    stack: slice
    membership: Tensor
    is_counted: bool


class Hyperball:
    """Takes the steps of an optimizer on spheres (Wen et al. 2026, arXiv:2606.16899).

    For a matrix W with the initial Frobenius norm R, and the optimizer's update u:

    W <- R normalize(W - lr R normalize(u))

    The learning rate is the length of a step relative to the weights, and weight decay has no
    effect. A step that is skipped, and one with an update of zero, changes nothing.

    The optimizer steps from zero, so that the weights become its update exactly; its update must
    not depend on the weights. Norms are sums in float64 over the ranks that divide a matrix.

    A checkpoint has R as a part, because norms computed in each step would drift. It is 0 before
    the first step, since pretrained weights are loaded after the optimizer is made.

    Args:
        optimizer: Its groups are divided: those of matrices get `on_sphere`, and no weight decay.
        model: The model, or this rank's stages and shards of it.
        matrix_owners: Sums over the ranks that divide the weights.
        other_settings: Settings of the groups of all other weights.

    Attributes:
        num_matrices: Number of matrices in the weights of this rank's stages.
        num_elements: Number of their elements.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        model: nn.Module,
        matrix_owners: MatrixOwners,
        *,
        other_settings: dict[str, Any],
    ) -> None:
        fusion_by_weight = find_layer_matrices(model)
        names = {p: name for name, p in model.named_parameters()}
        optimizer.param_groups = split_groups(
            optimizer.param_groups,
            set(fusion_by_weight),
            chosen_settings={"on_sphere": True, "weight_decay": 0.0},
            other_settings=other_settings,
        )
        self._matrix_owners = matrix_owners
        self._shard_by_weight: dict[Tensor, _WeightShard] = {}
        self._radius_by_name: dict[str, Tensor] = {}
        for weight, fusion in fusion_by_weight.items():
            name = names[weight]
            self._shard_by_weight[weight] = _describe_shard(weight, fusion, matrix_owners)
            stack_size = weight.shape[0] if weight.ndim == 3 else 1
            self._radius_by_name[name] = torch.zeros(
                stack_size, len(fusion.sizes), dtype=torch.float32, device=weight.device
            )
        self.num_matrices = sum(radius.numel() for radius in self._radius_by_name.values())
        self.num_elements = sum(weight.numel() for weight in fusion_by_weight)
        self._previous_weights: dict[Tensor, Tensor] = {}
        self._has_checked_radii = False
        optimizer.register_step_pre_hook(self._begin_step)
        optimizer.register_step_post_hook(self._end_step)

    def localize(self, local_of: Mapping[Tensor, nn.Parameter]) -> None:
        """Replace the weights of the model by this rank's shards of them."""
        self._shard_by_weight = {
            local_of[weight]: shard for weight, shard in self._shard_by_weight.items()
        }

    def state_dict(self) -> dict[str, Tensor]:
        """Return the radii [stack, matrices side by side] by the weights' names; live tensors."""
        return self._radius_by_name

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Load what `state_dict` returned."""
        for name, radius in self._radius_by_name.items():
            radius.copy_(state[name])

    @torch.no_grad()
    def _begin_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Store the weights, and let the optimizer step from zero."""
        for weight in self._shard_by_weight:
            self._previous_weights[weight] = weight.detach().clone()
            weight.zero_()

    @torch.no_grad()
    def _end_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Take the step along the spheres, from the stored weights."""
        groups = groups_of(optimizer)
        radii = list(self._radius_by_name.values())
        weights = list(self._shard_by_weight)
        if not self._has_checked_radii:
            self._initialize_radii(weights, radii)
            self._has_checked_radii = True
        update_norms = self._compute_norms(weights)
        for weight, radius, norm in zip(weights, radii, update_norms, strict=True):
            step_length = torch.where(norm > 0, groups[weight]["lr"] * radius / norm, 0.0)
            # The optimizer has stepped from zero, so the weight is its update.
            weight.mul_(self._spread_over_outputs(weight, step_length)).add_(
                self._previous_weights[weight]
            )
        norms = self._compute_norms(weights)
        for weight, radius, update_norm, norm in zip(
            weights, radii, update_norms, norms, strict=True
        ):
            scale = torch.where(update_norm > 0, radius / norm, 1.0)
            weight.mul_(self._spread_over_outputs(weight, scale))
        self._previous_weights.clear()

    def _initialize_radii(self, weights: Sequence[Tensor], radii: Sequence[Tensor]) -> None:
        """Set the radii that no checkpoint has set, once per start; the host waits for the device.

        Raises:
            ConfigError: A matrix begins at zero.
        """
        norms = self._compute_norms([self._previous_weights[weight] for weight in weights], weights)
        for radius, norm in zip(radii, norms, strict=True):
            radius.copy_(torch.where(radius > 0, radius, norm))
        self._check_radii(radii)

    def _check_radii(self, radii: Sequence[Tensor]) -> None:
        """Refuse matrices with a norm of zero, on any rank."""
        num_zero_radii = torch.stack([(radius == 0).sum() for radius in radii] or [torch.zeros(())])
        num_zero_matrices = int(self._matrix_owners.sum_over_ranks(num_zero_radii.sum().float()))
        if num_zero_matrices:
            names = [name for name, radius in self._radius_by_name.items() if (radius == 0).any()]
            example = f", such as {names[0]}" if names else ""
            raise ConfigError(
                "--hyperball keeps the norms of the matrices inside the model, and some of them "
                f"begin at zero{example}; give them other initial values, or leave it out."
            )

    def _compute_norms(
        self, tensors: Sequence[Tensor], weights: Sequence[Tensor] | None = None
    ) -> list[Tensor]:
        """Return the norms of all matrices [stack, matrices side by side], over all shards.

        Args:
            tensors: Tensors with the shapes of the weights.
            weights: The weights; by default the tensors.
        """
        radii, squared_norms = list(self._radius_by_name.values()), []
        for tensor, weight, radius in zip(tensors, weights or tensors, radii, strict=True):
            shard = self._shard_by_weight[weight]
            square_sums = torch.zeros_like(radius, dtype=sums_dtype(radius.device))
            if tensor.numel() and shard.is_counted:
                row_norms = torch.linalg.vector_norm(
                    tensor, dim=shard.input_dim, dtype=square_sums.dtype
                )
                square_sums[shard.stack] = row_norms.square() @ shard.membership
            squared_norms.append(square_sums.flatten())
        if not squared_norms:
            return []
        norms = self._matrix_owners.sum_over_shards(torch.cat(squared_norms)).sqrt()
        norms_by_weight = norms.split([radius.numel() for radius in radii])
        return [
            weight_norms.view_as(radius)
            for weight_norms, radius in zip(norms_by_weight, radii, strict=True)
        ]

    def _spread_over_outputs(self, weight: Tensor, factors: Tensor) -> Tensor:
        """Return factors for this rank's shard of a weight, from one for each of its matrices."""
        shard = self._shard_by_weight[weight]
        # Exact: each output belongs to one matrix.
        by_output = factors[shard.stack].to(shard.membership) @ shard.membership.T
        shape = list(weight.shape)
        shape[shard.input_dim] = 1
        return by_output.to(weight.dtype).view(shape)


class HyperballRunOptimizer(RunOptimizer):
    """An optimizer whose steps Hyperball takes."""

    def __init__(
        self, run_optimizer: RunOptimizer, hyperball: Hyperball, options: MatrixSettings
    ) -> None:
        super().__init__(run_optimizer.optimizer)
        self._run_optimizer, self._hyperball = run_optimizer, hyperball
        self._options = options

    def localize(self, local_of: Mapping[Tensor, nn.Parameter]) -> None:
        """Use the local shards that replace the parameters in the optimizer's groups."""
        self._run_optimizer.localize(local_of)
        self._hyperball.localize(local_of)

    def owner_of(self, path: str) -> int | None:
        """Return the rank that keeps the whole state of a matrix; None elsewhere."""
        return self._run_optimizer.owner_of(path)

    def parts(self) -> dict[str, Any]:
        """Return the radii."""
        return {"hyperball": self._hyperball}

    def describe(self) -> str:
        """Return lines for the beginning of the log."""
        line = (
            f"hyperball: {self._hyperball.num_matrices:,} matrices keep their initial norms; the "
            "learning rate is the length of their steps relative to them"
        )
        weight_decay = self._options.weight_decay
        if weight_decay:
            line += (
                f"; --weight_decay {weight_decay:g} applies to other matrices only, such as "
                "embeddings"
            )
        if self._options.embedding_learning_rate is None:
            line += (
                "; it is also the rate of all other weights, which is usually too high "
                "for them (--embedding_learning_rate)"
            )
        return "\n".join(filter(None, [self._run_optimizer.describe(), line]))

    def memory(self) -> dict[str, StateMemory]:
        """Return the memory of the weights before a step."""
        num_bytes = FP32 * self._hyperball.num_elements
        copies = StateMemory(stepping=num_bytes, divided_stepping=num_bytes)
        return self._run_optimizer.memory() | {"hyperball": copies}

    def traffic(self) -> MatrixTraffic | None:
        """Return what the optimizer sends; Hyperball sends two numbers for each matrix."""
        return self._run_optimizer.traffic()


class HyperballFactory(OptimizerFactory):
    """Makes an optimizer whose steps Hyperball takes."""

    def __init__(self, factory: OptimizerFactory, options: MatrixSettings) -> None:
        self._factory, self._options = factory, options

    def inspect_model(self, model: nn.Module) -> None:
        """Look at the whole model before it is divided."""
        self._factory.inspect_model(model)

    def make(self, model: nn.Module, mesh: DeviceMesh | None) -> RunOptimizer:
        """Return the optimizer of the weights that this rank has.

        Raises:
            ConfigError: Muon has no matrix to train.
        """
        run_optimizer = self._factory.make(model, mesh)
        matrix_owners = (
            run_optimizer.matrix_owners
            if isinstance(run_optimizer, MatrixRunOptimizer)
            else make_matrix_owners(mesh)
        )
        # A length relative to the weights is no rate for routers, whose steps are not.
        hyperball = Hyperball(
            run_optimizer.optimizer,
            model,
            matrix_owners,
            other_settings=embedding_settings(self._options),
        )
        return HyperballRunOptimizer(run_optimizer, hyperball, self._options)


def _describe_shard(
    weight: nn.Parameter, fusion: Fusion, matrix_owners: MatrixOwners
) -> _WeightShard:
    """Return which matrices this rank's shard of a weight has parts of."""
    output_dim = fusion.dim
    input_dim = 2 * weight.ndim - 3 - output_dim  # the other one of the last two
    num_outputs = weight.shape[output_dim]
    whole_membership = torch.zeros(
        num_outputs, len(fusion.sizes), dtype=sums_dtype(weight.device), device=weight.device
    )
    for matrix_index, outputs in enumerate(fusion.split(torch.arange(num_outputs), 0).values()):
        whole_membership[outputs, matrix_index] = 1.0
    return _WeightShard(
        input_dim=input_dim,
        stack=_find_local_range(weight, 0, matrix_owners) if weight.ndim == 3 else slice(0, 1),
        membership=whole_membership[_find_local_range(weight, output_dim, matrix_owners)],
        is_counted=matrix_owners.counts(weight),
    )


def _find_local_range(weight: nn.Parameter, dim: int, matrix_owners: MatrixOwners) -> slice:
    """Return the range of a weight's dimension that this rank's shard covers."""
    shape = [1] * weight.ndim
    shape[dim] = -1
    indices = torch.arange(weight.shape[dim]).view(shape).expand(weight.shape)
    local_indices = matrix_owners.shard_of(weight, indices)
    if not local_indices.numel():
        return slice(0, 0)
    first_index = int(local_indices.flatten()[0])
    return slice(first_index, first_index + local_indices.shape[dim])
