"""Balances the routers of a model in training, and measures the load of its experts."""

import contextlib
import itertools
import logging
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils.hooks import RemovableHandle

from llm.data.loader import StepBatch
from llm.extensions.moe.balancing import Kind, choose_auto_kind, make_balancing
from llm.extensions.moe.expert_layers import ExpertLayer, find_expert_layers
from llm.extensions.moe.losses import (
    PROBABILITIES,
    SCORES,
    assume_score,
    compute_balancing_loss,
    compute_router_z_loss,
    compute_score_errors,
    compute_sequence_shares,
    find_score,
)
from llm.extensions.moe.router_settings import MoEOptions
from llm.models.mixtures import mixture_size
from llm.runtime.float32 import sums_dtype
from llm.runtime.labels import IGNORED
from llm.runtime.logging import counted, event
from llm.trainers.gpt.auxiliary_loss import AttachLosses
from llm.trainers.gpt.seams import LoopExtension, Periodic

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from llm.trainers.gpt.seams import LoopContext

IDLE_LOAD = 0.1
"""An expert with less than this load, relative to the mean, counts as idle."""
IDLE_STEPS = 100
"""Consecutive idle steps of an expert after which the log warns."""

_MAX_COMPARISON_STEPS = 10
"""Steps after which the scores of a router are assumed if its weights do not show them."""

logger = logging.getLogger("llm")


class Routers(LoopExtension):
    """The routers of a model in training; every rank has the same loads and changes.

    The load of an expert is the number of tokens that chose it. It is counted in the backward pass,
    which runs once for each token, however often recomputation runs the forward pass.

    Args:
        options: How to balance, and how often to record the load of every expert.
        context: The run with its prepared model.
        layers: The layers with experts of the whole model, perhaps without weights.

    Attributes:
        balancing: How the run is balanced.
        is_real_sample: Whether each sample of the present micro-batch is real, bool [sequences]. A
            short last step has copies of a sample without labels, which count nowhere.
        scores: The scores of each layer's router by name, once known: biases and the auxiliary loss
            depend on them.
        score_errors: The errors of each layer's routing weights if its router had each of `SCORES`,
            summed over the tokens of a step on this rank, [layers, scores].

    Raises:
        ConfigError: The model cannot be balanced as the options ask.
    """

    part, description = "moe", "load of experts"

    def __init__(
        self, options: MoEOptions, context: "LoopContext", layers: Sequence[ExpertLayer]
    ) -> None:
        self._options, self._strategy = options, context.strategy
        self._model, self._layers = context.model, layers
        self._config: PreTrainedConfig = context.model.config.get_text_config()
        kind, reason = options.router_balancing, ""
        if kind == "auto":
            is_pretrained = bool(context.run.weights_from or context.run.init_from)
            kind, reason = choose_auto_kind(self._config, layers, is_pretrained=is_pretrained)
        self._set_balancing(kind, reason)
        device = context.strategy.device
        load_shape = len(layers), max(layer.num_experts for layer in layers)
        make_counts = partial(torch.zeros, load_shape, dtype=torch.int64, device=device)
        # Loads: of the step on this rank; then, over all ranks, of the last step that was not
        # skipped, of the logging interval, and since the last record.
        self._step_load, self._load, self._interval_load, self._recorded_load = (
            make_counts() for _ in range(4)
        )
        self._idle_steps = make_counts()
        self._is_expert = _make_expert_mask(layers, device)
        # The auxiliary loss and the z-loss, summed over tokens and layers; and the tokens.
        dtype = sums_dtype(device)
        self._step_losses = torch.zeros(2, dtype=dtype, device=device)
        self._interval_losses = torch.zeros(2, dtype=dtype, device=device)
        self._interval_tokens = torch.zeros((), dtype=dtype, device=device)
        self.scores: list[str | None] = [None] * len(layers)
        self.score_errors = torch.zeros(len(layers), len(SCORES), dtype=dtype, device=device)
        self._num_comparisons = 0  # steps, without skipped ones
        self._num_named_experts = 0  # idle experts of the last warning
        self.is_real_sample = torch.ones(0, dtype=torch.bool, device=device)
        loss = context.strategy.loss  # in a pipeline, the list of stages
        self._hooks = [
            module.register_forward_pre_hook(self._find_real_samples, with_kwargs=True)
            for module in (loss if isinstance(loss, nn.ModuleList) else [loss])
        ]
        row_by_layer = {layer.name: row for row, layer in enumerate(layers)}
        self._routers = [
            _Router(self, layer, row_by_layer[layer.name])
            for layer in find_expert_layers(context.strategy.model)
        ]
        if options.expert_load_steps is not None:
            self.periodic = Periodic("expert_loads", options.expert_load_steps, self._record_loads)

    @contextlib.contextmanager
    def add_losses_for_trial(self) -> Iterator[None]:
        """Add the losses to the passes inside the context, as when all scores are known.

        The routers are not usable afterwards.
        """
        self._assume_scores(self._rows_without_score())
        try:
            yield
        finally:
            for hook in itertools.chain(self._hooks, *(router.hooks for router in self._routers)):
                hook.remove()

    def _set_balancing(self, kind: Kind, reason: str = "") -> None:
        self.balancing = make_balancing(
            self._options, self._config, self._layers, kind=kind, reason=reason
        )

    def _find_real_samples(
        self, module: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]
    ) -> None:
        """Note which samples of a micro-batch have labels, before its forward pass."""
        if torch.is_grad_enabled():
            labels = kwargs["labels"] if "labels" in kwargs else args[1]
            self.is_real_sample = (labels != IGNORED).any(1)

    def compute_load_shares(self, row: int, chosen_experts: Tensor, num_experts: int) -> Tensor:
        """Return the share of each expert in the load that the auxiliary loss balances.

        Args:
            row: Row of the layer in the loads.
            chosen_experts: The choices of this micro-batch, [sequences, choices of all tokens].
            num_experts: Number of experts.

        Returns:
            [sequences or 1, experts]; zeros before the first step.
        """
        if self.balancing.is_per_sequence:
            return compute_sequence_shares(chosen_experts, num_experts)
        load = self._load[row : row + 1, :num_experts].float()
        return load / load.sum().clamp(min=1.0)

    def count_choices(
        self, row: int, is_real_sample: Tensor, chosen_experts: Tensor, losses: Tensor | None
    ) -> Tensor | None:
        """Count the choices and the losses of a micro-batch, in its backward pass.

        Args:
            row: Row of the layer in the loads.
            is_real_sample: Which sequences count, bool [sequences].
            chosen_experts: The choices of this micro-batch, [tokens, K].
            losses: The auxiliary loss and the z-loss of each sequence, summed over its tokens,
                [sequences, 2]; None without losses.

        Returns:
            The gradient of this rank's objective by the losses.
        """
        choices = chosen_experts.reshape(len(is_real_sample), -1)
        is_counted = is_real_sample.unsqueeze(1).expand_as(choices)
        self._step_load[row].scatter_add_(0, choices.flatten(), is_counted.flatten().long())
        if losses is None:
            return None
        sample_mask = is_real_sample.unsqueeze(1).to(losses.dtype)
        self._step_losses += (sample_mask * losses).sum(0)
        weight = self._strategy.token_weight * self._strategy.loss_scale()
        return (weight.to(losses.dtype) * sample_mask).expand_as(losses)

    def _find_scores(self) -> None:
        """Find the scores of all routers from the errors of a step; the host waits for the device.

        A step that was skipped does not count, because its weights may be NaN.
        """
        if self._strategy.world_size > 1:
            dist.all_reduce(self.score_errors)
        if not self._strategy.skipped:
            self._num_comparisons += 1
            errors_by_row = self.score_errors.tolist()
            for row in self._rows_without_score():
                self.scores[row] = find_score(errors_by_row[row])
            assumed_rows = []
            if self._num_comparisons >= _MAX_COMPARISON_STEPS:
                assumed_rows = self._rows_without_score()
                self._assume_scores(assumed_rows)
            if self._knows_scores and self.balancing.kind != "none":
                self._log_scores(assumed_rows)
        self.score_errors.zero_()

    def _assume_scores(self, rows: Sequence[int]) -> None:
        """Set the scores of the routers in some rows to those that are usual for their model."""
        for row in rows:
            has_bias = self._layers[row].bias is not None
            self.scores[row] = assume_score(self._config, has_bias=has_bias)

    def _rows_without_score(self) -> list[int]:
        rows = enumerate(zip(self._layers, self.scores, strict=True))
        return [row for row, (layer, score) in rows if layer.router is not None and score is None]

    def _log_scores(self, assumed_rows: Sequence[int]) -> None:
        """Log the scores of the routers, and which of them are assumed."""
        line = f"routers score by {' and '.join(sorted(set(filter(None, self.scores))))}"
        if assumed_rows:
            indices = ", ".join(str(self._layers[row].layer_index) for row in assumed_rows)
            line += (
                f": this is assumed for {counted(len(assumed_rows), 'layer')} ({indices}), because "
                f"the routing weights of {_MAX_COMPARISON_STEPS} steps did not show it. These "
                "steps had no auxiliary loss and changed no bias there"
            )
        logger.info(f"{line}.")

    @property
    def _knows_scores(self) -> bool:
        return not self._rows_without_score()

    def describe(self) -> list[str]:
        """Return the size of the mixture, and how it is balanced."""
        size = mixture_size(self._model)
        assert size is not None
        lines = [
            f"experts: {size.describe()}; {size.describe_active()}; {self.balancing.describe()}"
        ]
        layers_without_logits = [
            str(layer.layer_index) for layer in self._layers if layer.router is None
        ]
        if layers_without_logits and self.balancing.kind != "none":
            lines.append(
                f"The routers of {counted(len(layers_without_logits), 'layer')} have no logits, so "
                f"nothing balances them: {', '.join(layers_without_logits)}."
            )
        return lines

    @torch.no_grad()
    def after_step(self, step: int, batch: StepBatch) -> None:
        """Sum the load over ranks, and change the biases.

        A step that was skipped changes neither biases nor loads. Nothing is read from the device,
        except in the first steps until all scores are known.
        """
        if self._strategy.world_size > 1:
            dist.all_reduce(self._step_load)
            if self.balancing.has_losses:
                dist.all_reduce(self._step_losses)
        load = self._add_step_to_totals(batch.num_tokens)
        if not self._knows_scores:
            self._find_scores()
        if self.balancing.bias_update_rate:
            for router in self._routers:
                router.update_bias(load)
        self._step_load.zero_()

    def _add_step_to_totals(self, num_tokens: int) -> Tensor:
        """Add the load and the losses of a step to the totals, unless it was skipped.

        Returns:
            The load of the step, [layers, experts]; zeros if it was skipped.
        """
        is_taken = self._strategy.skipped == 0
        load = torch.where(is_taken, self._step_load, 0)
        self._load = torch.where(is_taken, self._step_load, self._load)
        self._interval_load += load
        if self.periodic is not None:
            self._recorded_load += load
        idle_steps = torch.where(self._idle_mask(load), self._idle_steps + 1, 0)
        self._idle_steps = torch.where(is_taken, idle_steps, self._idle_steps)
        if self.balancing.has_losses:
            self._interval_losses += torch.where(is_taken, self._step_losses, 0.0)
            self._interval_tokens += num_tokens * is_taken
            self._step_losses.zero_()
        return load

    def metrics(self) -> tuple[dict[str, float], str]:
        """Return the loads of the logging interval, relative to their means, and its losses."""
        largest_loads = self._relative_loads(self._interval_load).amax(1)
        num_idle = self._idle_mask(self._interval_load).sum()
        values = torch.stack([largest_loads.max(), largest_loads.mean(), num_idle]).tolist()
        names = ("moe_max_load", "moe_mean_max_load", "moe_idle_experts")
        metrics = dict(zip(names, values, strict=True))
        mean_losses = self._interval_losses / self._interval_tokens.clamp(min=1.0)
        aux_loss, z_loss = mean_losses.tolist()
        if self.balancing.aux_loss_coef:
            metrics["moe_aux_loss"] = aux_loss
        if self.balancing.z_loss_coef:
            metrics["moe_z_loss"] = z_loss
        for tensor in (self._interval_load, self._interval_losses, self._interval_tokens):
            tensor.zero_()
        self._warn_of_idle_experts()
        return metrics, f"load {metrics['moe_max_load']:.1f}x"

    def _relative_loads(self, loads: Tensor) -> Tensor:
        """Return loads relative to the mean of their layers, fp32 [layers, experts]."""
        means = loads.sum(1, keepdim=True) / self._is_expert.sum(1, keepdim=True)
        return loads / means.clamp(min=1e-9)

    def _idle_mask(self, loads: Tensor) -> Tensor:
        """Return which experts have less than `IDLE_LOAD` of the mean, bool [layers, experts]."""
        return (self._relative_loads(loads) < IDLE_LOAD) & self._is_expert

    def _warn_of_idle_experts(self) -> None:
        """Warn if experts were idle for many steps, and again whenever their number doubles."""
        idle_experts = (self._idle_steps >= IDLE_STEPS).nonzero().tolist()
        if len(idle_experts) < max(1, 2 * self._num_named_experts):
            return
        self._num_named_experts = len(idle_experts)
        row, expert = idle_experts[0]
        has_bias = any(layer.bias is not None for layer in self._layers)
        remedies = {
            "none": f"balance them with --router_balancing {'bias' if has_bias else 'loss'}",
            "bias": "raise --router_bias_update_rate",
            "loss": "raise --router_aux_loss_coef",
            "both": "raise --router_bias_update_rate or --router_aux_loss_coef",
        }
        layer_index, remedy = self._layers[row].layer_index, remedies[self.balancing.kind]
        logger.warning(
            f"{counted(len(idle_experts), 'expert')} had less than {IDLE_LOAD:g} of the mean load "
            f"in each of {IDLE_STEPS} steps, such as expert {expert} of layer {layer_index}; "
            f"{remedy} in a new run, or in this one with --change_on_resume."
        )

    def _record_loads(self, step: int) -> dict[str, float]:
        """Log the load of every expert since the last record as an event."""
        relative_loads = self._relative_loads(self._recorded_load)
        loads_by_layer = [
            [round(load, 3) for load in row[: layer.num_experts]]
            for row, layer in zip(relative_loads.tolist(), self._layers, strict=True)
        ]
        self._recorded_load.zero_()
        layer_indices = [layer.layer_index for layer in self._layers]
        largest_loads = [max(row) for row in loads_by_layer]
        logger.info(
            f"largest load of each layer at step {step}: "
            + ", ".join(f"{load:.2f}" for load in largest_loads),
            extra=event("experts", step=step, layers=layer_indices, loads=loads_by_layer),
        )
        return {
            f"moe_max_load/{layer_index}": load
            for layer_index, load in zip(layer_indices, largest_loads, strict=True)
        }

    def card_rows(self) -> dict[str, object]:
        """Return how the run was balanced, and the largest load of its last step."""
        largest = float(self._relative_loads(self._load).max())
        return {
            "balancing of experts": self.balancing.describe(),
            "largest load of an expert": f"{largest:.2f}x the mean of its layer, in the last step",
        }

    def begin(self) -> None:
        """Continue a run that was started without this extension.

        It has the loss that its configuration asks for, as it had until now, or no balancing.
        """
        if self._options.router_balancing == "auto":
            kind, reason = choose_auto_kind(self._config, self._layers, is_pretrained=True)
            if kind == "none":
                reason = "because the run was not until now"
            self._set_balancing(kind, reason)
        self.scores, self._num_comparisons = [None] * len(self._layers), 0
        for tensor in self._state_tensors().values():
            tensor.zero_()

    def state_dict(self) -> dict[str, Any]:
        """Return how the run is balanced, and its loads."""
        return {
            "balancing": self.balancing.kind,
            "scores": self.scores,
            "num_comparisons": self._num_comparisons,
            **{name: tensor.tolist() for name, tensor in self._state_tensors().items()},
        }

    def _state_tensors(self) -> dict[str, Tensor]:
        """Return the tensors of the state; all ranks have the same."""
        return {
            "load": self._load,
            "interval_load": self._interval_load,
            "recorded_load": self._recorded_load,
            "idle_steps": self._idle_steps,
            "interval_losses": self._interval_losses,
            "interval_tokens": self._interval_tokens,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the loads, and how the run is balanced unless an option sets it."""
        if self._options.router_balancing == "auto":
            self._set_balancing(state["balancing"])
        self.scores = list(state["scores"])
        self._num_comparisons = state.get("num_comparisons", 0)
        for name, tensor in self._state_tensors().items():
            tensor.copy_(torch.tensor(state[name], dtype=tensor.dtype))


class _Router:
    """A layer on this rank: hooks add its losses to the routing weights, and count its choices."""

    def __init__(self, routers: Routers, layer: ExpertLayer, row: int) -> None:
        self._routers, self._layer, self._row = routers, layer, row
        self._logits: Tensor | None = None  # of the present forward pass
        self.hooks: list[RemovableHandle] = []
        if layer.router is not None:
            store_logits = torch.compiler.disable(self._store_logits)
            self.hooks.append(layer.router.register_forward_hook(store_logits))
        replace_weights = torch.compiler.disable(self._replace_weights)
        self.hooks.append(
            layer.experts.register_forward_pre_hook(replace_weights, with_kwargs=True)
        )

    @property
    def _score(self) -> str | None:
        return self._routers.scores[self._row]

    def _store_logits(self, module: nn.Module, args: Any, output: Any) -> None:
        if torch.is_grad_enabled():
            self._logits = output[self._layer.logits_index] if isinstance(output, tuple) else output

    def _replace_weights(
        self, module: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]
    ) -> Any:
        """Replace the routing weights by equal ones whose backward pass includes the losses.

        Returns:
            The arguments of the experts; None to leave them unchanged outside of training.
        """
        hidden_states, chosen_experts, weights = *args, *kwargs.values()
        logits, self._logits = self._logits, None
        if not (torch.is_grad_enabled() and weights.requires_grad):
            return None
        losses = None
        if logits is not None:
            logits = logits.reshape(-1, logits.shape[-1]).float()
            if self._score is None:
                errors = compute_score_errors(logits, chosen_experts, weights)
                self._routers.score_errors[self._row] += errors
            losses = self._compute_scaled_losses(logits, chosen_experts)
        # In a pipeline other micro-batches have passed by the backward pass, so the mask is bound.
        is_real_sample = self._routers.is_real_sample
        count_choices = partial(self._routers.count_choices, self._row, is_real_sample)
        weights_with_losses = AttachLosses.apply(  # type: ignore[no-untyped-call]
            weights, count_choices, chosen_experts, losses
        )
        return (hidden_states, chosen_experts, weights_with_losses), {}

    def _compute_scaled_losses(self, logits: Tensor, chosen_experts: Tensor) -> Tensor | None:
        """Return the losses of each sequence, times their coefficients, [sequences, 2]."""
        balancing = self._routers.balancing
        if not balancing.has_losses:
            return None
        num_sequences, num_experts = len(self._routers.is_real_sample), logits.shape[-1]
        logits = logits.view(num_sequences, -1, num_experts)
        aux_loss = router_z_loss = logits.new_zeros(num_sequences)
        if balancing.aux_loss_coef and self._score is not None:
            scores = SCORES[self._score](logits)
            probabilities = scores / scores.sum(-1, keepdim=True)
            shares = self._routers.compute_load_shares(
                self._row, chosen_experts.reshape(num_sequences, -1), num_experts
            )
            aux_loss = balancing.aux_loss_coef * compute_balancing_loss(probabilities, shares)
        if balancing.z_loss_coef and self._score != PROBABILITIES:
            router_z_loss = balancing.z_loss_coef * compute_router_z_loss(logits)
        return torch.stack([aux_loss, router_z_loss], dim=1)

    def update_bias(self, load_by_row: Tensor) -> None:
        """Raise the biases of experts with less than the mean load, and lower the others.

        Args:
            load_by_row: Loads of the step by row, int64; zeros change nothing.
        """
        bias, num_experts = self._layer.bias, self._layer.num_experts
        if bias is None or (self._layer.router is not None and self._score is None):
            return
        load = load_by_row[self._row, :num_experts]
        total_load = load.sum()
        deficit = total_load - num_experts * load  # exact, so it is the same on all layouts
        balancing = self._routers.balancing
        if balancing.is_proportional:
            direction = deficit / total_load.clamp(min=1)
        else:
            direction = deficit.sign().float()
        # Softmax scores are 1/E on average, and sigmoid scores of small logits 1/2.
        score_unit = 2 / num_experts if self._score == "softmax" else 1.0
        rate = score_unit * balancing.bias_update_rate
        # The mean does not change choices, and would only make the bias grow.
        change = (rate * (direction - direction.mean())).to(bias.dtype).view(bias.shape)
        _add_to_bias(bias, change)


def _make_expert_mask(layers: Sequence[ExpertLayer], device: torch.device) -> Tensor:
    """Return which entries of the loads belong to an expert, bool [layers, most experts]."""
    expert_indices = range(max(layer.num_experts for layer in layers))
    return torch.tensor(
        [[expert_index < layer.num_experts for expert_index in expert_indices] for layer in layers],
        device=device,
    )


def _add_to_bias(bias: Tensor, change: Tensor) -> None:
    """Add a change, which every rank has as a whole, to a bias or to this rank's shard of it."""
    if isinstance(bias, DTensor):
        # Without a source rank, the ranks send no messages.
        local_change = distribute_tensor(
            change, bias.device_mesh, bias.placements, src_data_rank=None
        )
        bias.to_local().add_(local_change.to_local())
    else:
        bias.add_(change)
