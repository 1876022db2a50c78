"""The curvature of a model's linear layers: what is recorded, averaged and decomposed, and when."""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from llm.optim.eigenbases import Solution, damped_inverse, eigenbasis, power_iteration
from llm.optim.kfac.assignment import KFACStrategy, assign
from llm.optim.kfac.exchange import Exchange
from llm.optim.kfac.factors import Factor
from llm.optim.kfac.layers import Coverage, Layer
from llm.optim.kfac.statistics import Statistics
from llm.optim.kfac.update_times import UpdateTimes

Method = Literal["ekfac", "eigen", "cholesky"]


def is_due(every: int, step: int, turn: float = 0.0) -> bool:
    """Whether what happens once in so many steps happens at this one.

    At the beginning it happens more often, once in each of the windows 0, 1, 2-3, 4-7, 8-15, ...:
    the first averages are of few tokens, and with fp16 the first steps may be skipped altogether.

    Args:
        every: Length of an interval, in steps.
        step: The step.
        turn: Where in an interval, from 0 to below 1.
    """
    window = 1 << max(0, step.bit_length() - 1)
    if window < every:
        return step == 0 or step - window == int(turn * window)
    return step % every == int(turn * every)


class Curvature:
    """Factors of all covered layers, and their eigenbases or inverses.

    A step is: `capture_stats` around its forward and backward, then `update`, once.

    Args:
        coverage: The covered layers.
        method: What is computed of a factor: for ekfac an eigenbasis that follows it by power
            iterations, for eigen all eigenvectors and values, for cholesky the damped inverse.
        factor_update_steps: Steps between two updates of the averages.
        inv_update_steps: Steps between two updates of what is computed of one.
        factor_decay: Weight of the past at an update of the averages.
        damping: For cholesky, what is added to the eigenvalues: relative to the root of their
            mean product over the layer, split between A and G as their sizes are (the pi of
            Martens & Grosse 2015).
        max_dim: Wider factors are kept in diagonal blocks.
        strategy: Which ranks keep a layer's bases; see `assign`.
        spread: Let the factors take turns, so that no step has all the work. A compiled model
            runs uncompiled where anything is recorded, and so is better off without.
        compat: The arithmetic of the kfac-pytorch library: averages begin with the identity, G
            is that of the mean loss, damping is absolute, all factors are due at once.

    Attributes:
        coverage: What is covered, and what is not.
        layers: The covered layers.
        steps: Steps begun and updated so far, skipped ones included.
    """

    def __init__(
        self,
        coverage: Coverage,
        *,
        method: Method = "ekfac",
        factor_update_steps: int = 50,
        inv_update_steps: int = 50,
        factor_decay: float = 0.6,
        damping: float = 0.001,
        max_dim: int = 8192,
        strategy: KFACStrategy = "comm-opt",
        spread: bool = True,
        compat: bool = False,
    ) -> None:
        self.coverage = coverage
        self.layers: tuple[Layer, ...] = coverage.layers
        self.steps = 0
        self.method = method
        self.compat = compat
        self._factor_update_steps = factor_update_steps
        self._inv_update_steps = inv_update_steps
        self._factor_decay = factor_decay
        self._damping = damping
        self._spread = spread and not compat
        self._recording: list[Factor] = []
        self._scale: Tensor | float = 1.0
        self._recorded = False
        self._fallbacks = torch.zeros((), device=self.layers[0].weight.device)
        self._assign(strategy, max_dim)
        self._times = UpdateTimes()
        self._statistics = Statistics(
            self.layers,
            input_factors=self._input_factors,
            output_factors=self._output_factors,
            times=self._times,
        )

    def _assign(self, strategy: KFACStrategy, max_dim: int) -> None:
        """Spread the layers over the ranks and make what this one keeps."""
        sizes = {f"{layer.input_name}.A": layer.columns for layer in self.layers}
        sizes |= {f"{layer.name}.G": layer.rows for layer in self.layers}
        groups: dict[str, dict[str, float]] = {}
        for layer in self.layers:
            for name in (f"{layer.input_name}.A", f"{layer.name}.G"):
                cost = float(sizes[name] * min(sizes[name], max_dim) ** 2)
                groups.setdefault(layer.input_name, {})[name] = cost
        distributed = dist.is_available() and dist.is_initialized()
        rank = dist.get_rank() if distributed else 0
        self.assignment = assign(
            {group: list(costs.items()) for group, costs in groups.items()},
            world_size=dist.get_world_size() if distributed else 1,
            strategy=strategy,
        )
        self.exchange = Exchange(self.assignment, rank=rank)
        self._column = rank % self.assignment.num_columns
        factors = {
            name: Factor(
                name,
                size=sizes[name],
                max_dim=max_dim,
                device=self.layers[0].weight.device,
                owned=self.assignment.owner_of[name] == rank,
                used=self.assignment.column_of[group] == self._column,
                prior=self.compat,
            )
            for group, costs in groups.items()
            for name in costs
        }
        self.factors = list(factors.values())
        self._input_factors = {la.name: factors[f"{la.input_name}.A"] for la in self.layers}
        self._output_factors = {la.name: factors[f"{la.name}.G"] for la in self.layers}

    def factors_of(self, layer: Layer) -> tuple[Factor, Factor]:
        """A layer's A and G."""
        return self._input_factors[layer.name], self._output_factors[layer.name]

    def works_on(self, layer: Layer) -> bool:
        """Whether this rank computes a layer's update."""
        return self.assignment.column_of[layer.input_name] == self._column

    def share_updates(self, updates: Mapping[str, Tensor]) -> None:
        """Tell layers' updates, by name, from the ranks that work on them to all, in place."""
        columns: dict[int, list[Tensor]] = {}
        for layer in self.layers:
            if layer.name in updates:
                column = self.assignment.column_of[layer.input_name]
                columns.setdefault(column, []).append(updates[layer.name])
        self.exchange.share_updates(columns)

    @contextlib.contextmanager
    def capture_stats(
        self, *, token_weight: float = 1.0, loss_scale: Tensor | float = 1.0
    ) -> Iterator[None]:
        """Surround one step's forward and backward passes, all micro-batches of it.

        Args:
            token_weight: What the loss of each token is multiplied by in the objective: one over
                the step's tokens, times the ranks where gradients are averaged over them.
            loss_scale: What the objective is multiplied by before `backward`.
        """
        for factor in self.factors:
            factor.discard()  # of a step that was begun and given up
        self._recording = [factor for factor in self.factors if self._is_recorded(factor)]
        # G of compat is that of the objective, not that of single tokens.
        self._scale = (loss_scale if self.compat else loss_scale * token_weight) ** -2
        self._recorded = True
        if not self._recording:
            yield
            return
        with self._statistics.capture_stats(self._recording):
            yield

    @torch.no_grad()
    def update(self, found_inf: Tensor | None = None) -> dict[str, list[Tensor]]:
        """End a step: take its statistics into the averages, and renew the bases that are due.

        Args:
            found_inf: 1.0 where the step is skipped, which leaves averages and bases as they
                are; read on the device.

        Returns:
            For each factor with a new basis, by name, the turn from the old one to it: the
            blocks of old^T new.
        """
        if not self._recorded:
            return {}
        if self._recording:
            with self._times.measure("factor"):
                self._average(found_inf)
            self._times.end("factor")
        due = [factor for factor in self.factors if self._is_due(factor)]
        turns: dict[str, list[Tensor]] = {}
        if due:
            with self._times.measure("inv"):
                turns = self._renew(due, found_inf)
            self._times.end("inv")
        self.steps += 1
        self._recorded = False
        return turns

    def _average(self, found_inf: Tensor | None) -> None:
        outputs = {factor.name for factor in self._output_factors.values()}
        added_up = self.exchange.reduce(self._recording)
        for factor in self._recording:
            if factor.owned:
                factor.commit(
                    *added_up[factor.name],
                    decay=self._factor_decay,
                    scale=self._scale if factor.name in outputs else 1.0,
                    keep=1.0 if found_inf is None else 1.0 - found_inf,
                )

    def _is_recorded(self, factor: Factor) -> bool:
        """Whether this step's tokens go into a factor's average."""
        if self.compat:
            return self.steps % self._factor_update_steps == 0
        # What is decomposed at a step is recorded at it, so that no basis is older than it must.
        offset = int(self._turn(factor) * self._inv_update_steps)
        return (self.steps - offset) % self._factor_update_steps == 0 or self._is_due(factor)

    def _is_due(self, factor: Factor) -> bool:
        """Whether a factor is decomposed at this step."""
        if self.compat:
            return self.steps % self._inv_update_steps == 0
        return is_due(self._inv_update_steps, self.steps, self._turn(factor))

    def _turn(self, factor: Factor) -> float:
        return self.assignment.turn_of[factor.name] if self._spread else 0.0

    def _renew(self, due: list[Factor], found_inf: Tensor | None) -> dict[str, list[Tensor]]:
        before = {}
        if self.method == "ekfac":
            before = {factor.name: [basis.clone() for basis in factor.bases] for factor in due}
        for factor in due:
            if factor.owned:
                self._fallbacks += self._solve(factor, found_inf)
        self.exchange.share_solutions(due)
        return {
            factor.name: [
                old.T @ new for old, new in zip(before[factor.name], factor.bases, strict=True)
            ]
            for factor in due
            if before
        }

    def _solve(self, factor: Factor, found_inf: Tensor | None) -> Tensor:
        """Renew what is computed of a factor; 1 if that failed in any way, else 0."""
        keep = factor.count > 0
        if found_inf is not None:
            keep = keep & (found_inf == 0)
        averages = factor.averages()
        trace = torch.stack([average.trace() for average in averages]).sum()
        failed = torch.zeros_like(factor.count)
        for average, basis, values in zip(averages, factor.bases, factor.values, strict=True):
            found = self._solution(average, basis, trace / factor.size)
            basis.copy_(torch.where(keep, found.basis, basis))
            values.copy_(torch.where(keep, found.values, values))
            failed = torch.maximum(failed, (found.fallback > 0) * keep.float())
        return failed

    def _solution(self, average: Tensor, basis: Tensor, mean: Tensor) -> Solution:
        if self.method == "cholesky":
            damping = self._damping if self.compat else self._damping**0.5 * mean
            return damped_inverse(average, damping, basis)
        if self.method == "eigen" or self.steps < self._inv_update_steps:
            return eigenbasis(average, basis)
        return power_iteration(average, basis)

    def metrics(self) -> dict[str, Tensor]:
        """Numbers for the log, on the device; all ranks must call it.

        Returns:
            `fallbacks`: failures so far, on all ranks. `condition`: the largest condition number
            of a factor that this rank keeps, cut off at 1e7, which is beyond fp32; not with
            inverses, which are found without eigenvalues. Besides, on the host, what
            `UpdateTimes.take` gives.
        """
        found = {"fallbacks": self.exchange.add_up(self._fallbacks), **self._times.take()}
        if self.method == "cholesky":
            return found
        conditions = [
            values.max() / values.min().clamp_min(1e-7 * values.max()).clamp_min(1e-30)
            for factor in self.factors
            for values in factor.values
        ]
        largest = torch.stack(conditions).max() if conditions else torch.ones_like(self._fallbacks)
        return {**found, "condition": largest}

    def num_bytes(self) -> int:
        """Memory of averages, bases and eigenvalues on this rank."""
        return sum(t.nbytes for factor in self.factors for t in factor.tensors().values())

    def describe(self) -> str:
        """A few lines for the log: what is covered, and the memory on this rank."""
        divided = sum(len(factor.widths) > 1 for factor in self.factors)
        blocks = f", {divided} of {len(self.factors)} factors in diagonal blocks" if divided else ""
        return (
            f"{self.coverage.describe()}\nK-FAC keeps {self.num_bytes() / 2**20:,.1f} MiB of "
            f"factors and bases on this rank{blocks}."
        )

    def state_dict(self) -> dict[str, Any]:
        """Averages and bases by factor, and the number of steps, the same on all ranks.

        With one rank they are the live tensors, with several copies; all must call it.
        """
        return {
            "steps": self.steps,
            "fallbacks": self.exchange.add_up(self._fallbacks),
            "factors": {factor.name: self.exchange.gather(factor) for factor in self.factors},
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` gave."""
        self.steps = int(state["steps"])
        # Each rank counts its own, and rank 0 those of before.
        self._fallbacks.copy_(state["fallbacks"]).mul_(self.exchange.rank == 0)
        for factor in self.factors:
            for key, tensor in factor.tensors().items():
                tensor.copy_(state["factors"][factor.name][key])
