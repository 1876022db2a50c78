"""The factors of a model's linear layers and their eigenbases, and when each is updated."""

import contextlib
from collections.abc import Iterator
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from llm.extensions.kfac.distribution import Assignment, Exchange, assign_factors
from llm.extensions.kfac.factors import Factor, LayerToRecord, UpdateTimes, record_layers
from llm.extensions.kfac.layers import Coverage, Layer
from llm.extensions.matrix_optim.eigenbases import (
    Solution,
    compute_eigenbasis,
    take_power_iteration,
)
from llm.extensions.matrix_optim.matrix_owners import FactorRanks
from llm.runtime.float32 import full_float32

Method = Literal["ekfac", "eigen"]


def is_update_due(interval: int, step: int, phase: float = 0.0) -> bool:
    """Return whether an update is due at this step.

    At the start it is due more often, once in each of the windows 0, 1, 2-3, 4-7, 8-15, ...: the
    first averages have few tokens, and with fp16 the first steps may all be skipped.

    Args:
        interval: Steps between two updates.
        step: The step, from 0.
        phase: Position in the interval, in [0, 1).
    """
    window = 1 << max(0, step.bit_length() - 1)
    if window < interval:
        return step == 0 or step - window == int(phase * window)
    return step % interval == int(phase * interval)


def _default_group_ranks() -> FactorRanks:
    """Return all ranks of the default process group, or one rank without it."""
    if not (dist.is_available() and dist.is_initialized()):
        return FactorRanks(rank=0, size=1, counts_failures=True)
    rank = dist.get_rank()
    return FactorRanks(rank=rank, size=dist.get_world_size(), counts_failures=rank == 0)


class Curvature:
    """Factors of all covered layers, and their eigenbases.

    In each step, `capture_stats` surrounds the forward and backward passes, and `update` is called
    once after them.

    Args:
        coverage: The covered layers.
        method: The decomposition of a factor: for ekfac an eigenbasis that follows the factor by
            power iterations, for eigen all eigenvectors and eigenvalues.
        factor_update_steps: Steps between two updates of the averages.
        inv_update_steps: Steps between two decompositions of a factor.
        factor_decay: Decay of the factors' moving averages, per update.
        max_dim: Wider factors are kept in diagonal blocks.
        spread: Spread the factors' updates over the interval, so that no step has all the work. A
            compiled model runs uncompiled in recording steps, so it is faster without.
        ranks: The ranks that share the layers' factors if weights are sharded; one of them then
            keeps a layer's bases. None if every rank keeps all bases.

    Attributes:
        coverage: Covered and skipped layers.
        layers: The covered layers.
        method: The decomposition.
        is_replicated: Whether every rank keeps the bases of all layers.
        steps: Steps completed so far, including skipped ones.
        factors: The factors of all layers; layers may share A.
        exchange: Collective operations between ranks.
    """

    def __init__(
        self,
        coverage: Coverage,
        *,
        method: Method = "ekfac",
        factor_update_steps: int = 50,
        inv_update_steps: int = 50,
        factor_decay: float = 0.6,
        max_dim: int = 8192,
        spread: bool = True,
        ranks: FactorRanks | None = None,
    ) -> None:
        self.coverage = coverage
        self.layers = coverage.layers
        self.steps = 0
        self.method = method
        self._factor_update_steps = factor_update_steps
        self._inv_update_steps = inv_update_steps
        self._factor_decay = factor_decay
        self._is_spread = spread
        self._recorded_factors: list[Factor] = []
        self._output_scale: Tensor | float = 1.0
        self._has_captured = False
        self._num_fallbacks = torch.zeros((), device=self.layers[0].weight.device)
        self._update_times = UpdateTimes()
        self.is_replicated = ranks is None
        if ranks is None:
            ranks = _default_group_ranks()
        self._rank = ranks.rank
        self._assignment = self._assign_factors(max_dim, world_size=ranks.size)
        self.exchange = Exchange(self._assignment, ranks, broadcasts_bases=self.is_replicated)
        self._factor_by_name = self._make_factors(max_dim)
        self.factors = list(self._factor_by_name.values())

    def _assign_factors(self, max_dim: int, *, world_size: int) -> Assignment:
        """Give each factor an owner, and a position in the update interval."""
        # The decomposition of a block of width w takes about w^3 operations.
        costs = {
            group: {
                name: float(size * min(size, max_dim) ** 2) for name, size in size_by_factor.items()
            }
            for group, size_by_factor in self.coverage.factor_sizes.items()
        }
        # Layers that share A are needed together.
        return assign_factors(
            {input_name: costs[input_name] for input_name in self._list_input_names()},
            world_size=world_size,
            keeps_groups_together=not self.is_replicated,
            model_groups=costs,
        )

    def _list_input_names(self) -> list[str]:
        """Return the names of the layers that provide the factors of inputs."""
        return list(dict.fromkeys(layer.input_name for layer in self.layers))

    def _make_factors(self, max_dim: int) -> dict[str, Factor]:
        """Return the factors of all layers by name, with this rank's tensors."""
        factors = {}
        for input_name in self._list_input_names():
            for name, size in self.coverage.factor_sizes[input_name].items():
                is_owned = self._assignment.owner_by_factor[name] == self._rank
                factors[name] = Factor(
                    name,
                    size=size,
                    max_dim=max_dim,
                    device=self.layers[0].weight.device,
                    is_owned=is_owned,
                    needs_bases=self.is_replicated or is_owned,
                )
        return factors

    def factors_of(self, layer: Layer) -> tuple[Factor, Factor]:
        """Return a layer's A and G."""
        names = f"{layer.input_name}.A", f"{layer.name}.G"
        input_factor, output_factor = (self._factor_by_name[name] for name in names)
        return input_factor, output_factor

    def computes_update(self, layer: Layer) -> bool:
        """Return whether this rank computes a layer's update."""
        return self.updater_of(layer) in (None, self._rank)

    def owner_of(self, factor_name: str) -> int | None:
        """Return the rank that decomposes a factor, by the factor's name; None if there is none."""
        return self._assignment.owner_by_factor.get(factor_name)

    def updater_of(self, layer: Layer) -> int | None:
        """Return the rank that computes a layer's update; None if every rank does."""
        return None if self.is_replicated else self.owner_of(f"{layer.input_name}.A")

    @contextlib.contextmanager
    def capture_stats(
        self, *, token_weight: float = 1.0, loss_scale: Tensor | float = 1.0
    ) -> Iterator[None]:
        """Surround one step's forward and backward passes, all micro-batches of it.

        Args:
            token_weight: Factor on each token's loss in the objective: one over the step's tokens,
                times the number of ranks if gradients are averaged over ranks.
            loss_scale: Factor on the objective before `backward`.
        """
        for factor in self.factors:
            factor.discard_step()  # Drop the tokens of an interrupted step or a trial.
        if self._has_captured:
            self._update_times.pop_means()  # their time is not the time of an update
        self._recorded_factors = [factor for factor in self.factors if self._is_recorded(factor)]
        # Undo the loss scale and token weight in G.
        self._output_scale = (loss_scale * token_weight) ** -2
        self._has_captured = True
        if not self._recorded_factors:
            yield  # Without hooks, a compiled model runs compiled.
            return
        with record_layers(self._select_recorded_layers(), self._update_times):
            yield

    def _select_recorded_layers(self) -> list[LayerToRecord]:
        """Return the layers with factors that this step records."""
        recorded_layers = []
        for layer in self.layers:
            input_factor, output_factor = (
                factor if factor in self._recorded_factors else None
                for factor in self.factors_of(layer)
            )
            if layer.input_name != layer.name:
                input_factor = None  # The first of the layers with this input records it.
            if input_factor is not None or output_factor is not None:
                recorded_layers.append(LayerToRecord(layer, input_factor, output_factor))
        return recorded_layers

    @torch.no_grad()
    def update(self, found_inf: Tensor | None = None) -> dict[str, list[Tensor]]:
        """End a step: update the averages with its tokens, and decompose the factors that are due.

        Args:
            found_inf: 1.0 if the step is skipped: averages and bases then do not change; read on
                the device.

        Returns:
            With ekfac, the rotation from the old to the new basis of each updated factor, by name:
                the blocks of old^T new.
        """
        if not self._has_captured:
            return {}
        if self._recorded_factors:
            with self._update_times.measure("factor"):
                self._average_factors(found_inf)
        due_factors = [factor for factor in self.factors if self._is_update_due(factor)]
        rotations: dict[str, list[Tensor]] = {}
        if due_factors:
            with self._update_times.measure("inv"):
                rotations = self._decompose_factors(due_factors, found_inf)
        self.steps += 1
        self._has_captured = False
        return rotations

    def _average_factors(self, found_inf: Tensor | None) -> None:
        """Sum the step's tokens over ranks, and update the averages that this rank owns."""
        sums = self.exchange.reduce_step_sums(self._recorded_factors)
        for factor in self._recorded_factors:
            if factor.is_owned:
                factor.update_average(
                    *sums[factor.name],
                    decay=self._factor_decay,
                    scale=self._output_scale if factor.name.endswith(".G") else 1.0,
                    update_mask=1.0 if found_inf is None else 1.0 - found_inf,
                )

    def _is_recorded(self, factor: Factor) -> bool:
        """Return whether this step's tokens go into a factor's average."""
        # Record a factor at the step that decomposes it, so that its basis is up to date.
        offset = int(self._update_phase(factor) * self._inv_update_steps)
        return (self.steps - offset) % self._factor_update_steps == 0 or self._is_update_due(factor)

    def _is_update_due(self, factor: Factor) -> bool:
        """Return whether a factor is decomposed at this step."""
        return is_update_due(self._inv_update_steps, self.steps, self._update_phase(factor))

    def _update_phase(self, factor: Factor) -> float:
        return self._assignment.phase_by_factor[factor.name] if self._is_spread else 0.0

    @full_float32()
    def _decompose_factors(
        self, due_factors: list[Factor], found_inf: Tensor | None
    ) -> dict[str, list[Tensor]]:
        """Decompose factors on their owners; return the rotations as `update` does."""
        old_bases = {}
        if self.method == "ekfac":
            old_bases = {
                factor.name: [basis.clone() for basis in factor.bases] for factor in due_factors
            }
        for factor in due_factors:
            if factor.is_owned:
                self._num_fallbacks += self._decompose_factor(factor, found_inf)
        self.exchange.broadcast_bases(due_factors)
        return {
            factor_name: [
                old_basis.T @ new_basis
                for old_basis, new_basis in zip(
                    old_blocks, self._factor_by_name[factor_name].bases, strict=True
                )
            ]
            for factor_name, old_blocks in old_bases.items()
        }

    def _decompose_factor(self, factor: Factor, found_inf: Tensor | None) -> Tensor:
        """Decompose a factor in place; return 1.0 if any block needed a fallback, else 0.0."""
        update_mask = factor.count > 0
        if found_inf is not None:
            update_mask = update_mask & (found_inf == 0)
        fallback_flag = torch.zeros_like(factor.count)
        for average, basis, eigenvalues in zip(
            factor.averages(), factor.bases, factor.eigenvalues, strict=True
        ):
            solution = self._solve_block(average, basis)
            # Selected on the device, so that the host does not wait for `found_inf`.
            basis.copy_(torch.where(update_mask, solution.basis, basis))
            eigenvalues.copy_(torch.where(update_mask, solution.eigenvalues, eigenvalues))
            fallback_flag = torch.maximum(
                fallback_flag, (solution.fallback > 0) * update_mask.float()
            )
        return fallback_flag

    def _solve_block(self, average: Tensor, basis: Tensor) -> Solution:
        """Decompose a block of a factor by the method; its previous basis is the start."""
        # A power iteration needs a basis near the eigenvectors, so the first decompositions are
        # exact.
        if self.method == "eigen" or self.steps < self._inv_update_steps:
            return compute_eigenbasis(average, basis)
        return take_power_iteration(average, basis)

    def metrics(self) -> dict[str, Tensor]:
        """Return numbers for the log, on the device; all ranks must call it.

        Returns:
            `fallbacks`: failed decompositions so far, on all ranks. `condition`: the largest
            condition number of a factor on this rank, at most 1e7, the limit of fp32. On the host,
            the times of `UpdateTimes.pop_means`.
        """
        return {
            "fallbacks": self.exchange.sum_count(self._num_fallbacks),
            **self._update_times.pop_means(),
            "condition": self._compute_largest_condition(),
        }

    def _compute_largest_condition(self) -> Tensor:
        """Return the largest condition number of a factor on this rank; 1 without bases."""
        conditions = [
            values.max() / values.min().clamp_min(1e-7 * values.max()).clamp_min(1e-30)
            for factor in self.factors
            for values in factor.eigenvalues
        ]
        if not conditions:
            return torch.ones_like(self._num_fallbacks)
        return torch.stack(conditions).max()

    def num_bytes(self) -> int:
        """Return the memory of averages, bases and eigenvalues on this rank, in bytes."""
        return sum(t.nbytes for factor in self.factors for t in factor.tensors().values())

    def describe(self) -> str:
        """Return a few lines for the log: the coverage, and the memory on this rank."""
        num_divided = sum(len(factor.widths) > 1 for factor in self.factors)
        blocks = ""
        if num_divided:
            blocks = f", {num_divided} of {len(self.factors)} factors in diagonal blocks"
        return (
            f"{self.coverage.describe()}\nK-FAC keeps {self.num_bytes() / 2**20:,.1f} MiB of "
            f"factors and bases on this rank{blocks}."
        )

    def state_dict(self) -> dict[str, Any]:
        """Return averages and bases by factor, and the number of steps; all ranks must call it.

        The tensors are live. A factor's owner keeps all of it.
        """
        return {
            "steps": self.steps,
            "fallbacks": self.exchange.sum_count(self._num_fallbacks),
            "factors": {factor.name: factor.tensors() for factor in self.factors},
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what `state_dict` returned."""
        self.steps = int(state["steps"])
        # The saved number is the sum over ranks: only one rank continues it, so it counts once.
        self._num_fallbacks.copy_(state["fallbacks"]).mul_(self.exchange.counts_failures)
        for factor in self.factors:
            for key, tensor in factor.tensors().items():
                tensor.copy_(state["factors"][factor.name][key])
