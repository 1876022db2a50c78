"""Final loss of gossip and DiLoCo against all-reduce, each at its best learning rate.

The ranks' models train side by side in one process. Models, optimizers, rounds and DiLoCo's outer
step are those of the trainer; the tests show that ranks on a network compute the same.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.func import functional_call, grad, vmap

from benchmarks.characters import BETAS, WEIGHT_DECAY, Text, make_model, validation_loss
from benchmarks.measure import say
from benchmarks.report import Section, table
from llm.extensions.decentralized.accum_adamw import AccumAdamW
from llm.extensions.decentralized.diloco import OuterOptimizer
from llm.extensions.decentralized.modes import DiLoCo
from llm.extensions.decentralized.rounds import TOPOLOGIES, make_rounds
from llm.models.loss import LanguageModelLoss
from llm.optim.groups import decays
from llm.optim.options import OptimizerOptions
from llm.optim.schedule import make_schedule
from tests.support.decentralized import mixing_matrix

_MOST_EXTENSIONS = 3
MAX_GRAD_NORM = 1.0


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The settings that all trainings share.

    Attributes:
        text: A text, read as characters.
        ranks: Simulated ranks, among which a step's samples are divided.
        ranks_per_node: Ranks of a node.
        steps: Optimizer steps.
        batch_size: Samples of a step over all ranks.
        block_size: Characters of a sample.
        width: Width of the model.
        layers: Layers of the model.
        sync_every: Inner steps of DiLoCo.
        accum_steps: Steps of a block of AccumAdamW.
    """

    text: str
    ranks: int
    ranks_per_node: int
    steps: int
    batch_size: int
    block_size: int
    width: int
    layers: int
    sync_every: int
    accum_steps: int


class _Replicas:
    """Models of one shape, whose gradients are computed together.

    Attributes:
        weights: Weights by name, float32 [replicas, ...].

    Args:
        setting: The settings of all trainings.
        number: Number of models, which start equal.
        vocab_size: Characters of the text.
        seed: Seed of the initial weights.
    """

    def __init__(self, setting: Setting, number: int, *, vocab_size: int, seed: int) -> None:
        self._loss = _make_loss(setting, vocab_size=vocab_size, seed=seed)
        self._buffers = dict(self._loss.named_buffers())
        self.weights = {
            name: parameter.detach().expand(number, *parameter.shape).clone()
            for name, parameter in self._loss.named_parameters()
        }
        self._gradient = vmap(grad(self._mean_loss))
        self.number = number

    def _mean_loss(self, weights: dict[str, Tensor], inputs: Tensor, labels: Tensor) -> Tensor:
        objective, _ = functional_call(self._loss, (weights, self._buffers), (inputs, labels))
        mean: Tensor = objective / inputs.numel()
        return mean

    def groups(self) -> list[dict[str, Any]]:
        """Return the parameter groups of one element-wise optimizer for all models."""
        named = list(self._loss.named_parameters())
        return [
            {
                "params": [self.weights[name] for name, p in named if decays(name, p) == decayed],
                "weight_decay": WEIGHT_DECAY if decayed else 0.0,
            }
            for decayed in (True, False)
        ]

    def compute_gradients(self, inputs: Tensor, labels: Tensor) -> None:
        """Compute each model's gradient on its samples, clipped by its own norm."""
        gradients = self._gradient(
            self.weights,
            inputs.view(self.number, -1, inputs.shape[1]),
            labels.view(self.number, -1, labels.shape[1]),
        )
        squares = sum(g.flatten(1).square().sum(dim=1) for g in gradients.values())
        factor = torch.clamp(MAX_GRAD_NORM / (squares.sqrt() + 1e-6), max=1.0)
        for name, gradient in gradients.items():
            shape = (self.number, *[1] * (gradient.ndim - 1))
            # Fused optimizers need the same memory layout of gradients and weights.
            self.weights[name].grad = (gradient * factor.view(shape)).contiguous()

    def mix(self, matrix: Tensor) -> None:
        """Mix the weights: `x_i <- sum_j W[i, j] x_j`."""
        for weight in self.weights.values():
            weight.copy_((matrix @ weight.flatten(1)).view_as(weight))

    def mean(self) -> dict[str, Tensor]:
        """Return the mean of the models' weights."""
        return {name: weight.mean(dim=0) for name, weight in self.weights.items()}

    def distance(self) -> float:
        """Return the models' distance from their mean, as the trainer logs it."""
        mean = self.mean()
        apart = sum(
            float((w - mean[name]).square().sum()) / self.number for name, w in self.weights.items()
        )
        return math.sqrt(apart / sum(float(m.square().sum()) for m in mean.values()))

    @torch.no_grad()
    def validation_loss(self, text: Text) -> float:
        """Return the loss of the mean of the weights, in nats a character."""
        for name, parameter in self._loss.named_parameters():
            parameter.copy_(self.weights[name].mean(dim=0))
        return validation_loss(self._loss, text)


def _make_loss(setting: Setting, *, vocab_size: int, seed: int) -> LanguageModelLoss:
    # Without the kernels that torch.func cannot transform.
    with patch("llm.models.build.fuse_gelu"), patch("llm.models.build.tie_gradients"):
        model = make_model(
            width=setting.width,
            layers=setting.layers,
            block_size=setting.block_size,
            vocab_size=vocab_size,
            seed=seed,
        )
    return LanguageModelLoss(model, chunked=False)


def train(setting: Setting, method: str, *, learning_rate: float, seed: int) -> tuple[float, float]:
    """Train by a method; the samples depend only on the seed.

    Args:
        setting: The settings of all trainings.
        method: `allreduce`, a topology, a topology with `-adamw`, or `diloco`.
        learning_rate: Peak of a cosine with warm-up.
        seed: Seed of the weights and the samples.

    Returns:
        Validation loss of the mean of the weights, in nats a character, and the distance of ranks
        from that mean.
    """
    text = Text(Path(setting.text), batch_size=setting.batch_size, block_size=setting.block_size)
    number = 1 if method == "allreduce" else setting.ranks
    replicas = _Replicas(setting, number, vocab_size=len(text.vocab), seed=seed)
    optimizer = _make_optimizer(setting, method, replicas, learning_rate)
    topology = method.removesuffix("-adamw")
    matrices: list[Tensor] = []
    if topology in TOPOLOGIES:
        rounds = make_rounds(topology, ranks=setting.ranks, ranks_per_node=setting.ranks_per_node)
        matrices = [torch.from_numpy(mixing_matrix(groups)).float() for groups in rounds]
    outer = _Outer(replicas, setting.sync_every) if method == "diloco" else None
    schedule = make_schedule(
        OptimizerOptions(
            lr_scheduler_type="cosine",
            learning_rate=learning_rate,
            min_learning_rate=0.1 * learning_rate,
        ),
        total_steps=setting.steps,
        warmup_steps=setting.steps // 10,
    )
    generator = torch.Generator().manual_seed(seed)
    for step in range(setting.steps):
        replicas.compute_gradients(*text.batch("train", generator))
        if matrices and step > 0:  # the exchange that began after the last step
            replicas.mix(matrices[(step - 1) % len(matrices)])
        for group in optimizer.param_groups:
            group["lr"] = schedule(step)
        optimizer.step()
        if outer is not None:
            outer.after_step(step)
    return replicas.validation_loss(text), replicas.distance()


def _make_optimizer(
    setting: Setting, method: str, replicas: _Replicas, learning_rate: float
) -> torch.optim.Optimizer:
    groups = replicas.groups()
    if method in TOPOLOGIES:
        return AccumAdamW(
            groups, lr=learning_rate, betas=BETAS, eps=1e-8, accum_steps=setting.accum_steps
        )
    return torch.optim.AdamW(groups, lr=learning_rate, betas=BETAS, eps=1e-8, fused=True)


class _Outer:
    """DiLoCo's outer step on the mean of the replicas."""

    def __init__(self, replicas: _Replicas, sync_every: int) -> None:
        self._replicas = replicas
        self._sync_every = sync_every
        self._mean = replicas.mean()
        settings = DiLoCo(inner_steps=1, outer_learning_rate=0.7, outer_momentum=0.9)
        self._optimizer = OuterOptimizer(settings, self._mean, world_size=1)
        self._optimizer.before_step()

    def after_step(self, step: int) -> None:
        """Count a step; if an outer step is due, take it and give its result to all replicas."""
        if (step + 1) % self._sync_every == 0:
            for name, mean in self._replicas.mean().items():
                self._mean[name].copy_(mean)
            self._optimizer.after_step()
            for name, weight in self._replicas.weights.items():
                weight.copy_(self._mean[name].expand_as(weight))
            self._optimizer.before_step()


class Losses:
    """The results of trainings by method, learning rate and seed, each of which runs once.

    Args:
        setting: The settings of all trainings.
    """

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        self._found: dict[tuple[str, float, int], tuple[float, float]] = {}

    def of(self, method: str, rate: float, seed: int) -> tuple[float, float]:
        """Return validation loss and distance from the mean, and train if that is not done yet."""
        key = method, rate, seed
        if key not in self._found:
            self._found[key] = train(self._setting, method, learning_rate=rate, seed=seed)
            loss, distance = self._found[key]
            say(f"{method} at {rate:g} from seed {seed}: {loss:.4f} (distance {distance:.2g})")
        return self._found[key]

    def tune(self, method: str, rates: Sequence[float]) -> tuple[float, dict[float, float]]:
        """Return the best rate of seed 0, and the losses by rate.

        Further rates, doubled or halved, are tried while the best rate is the largest or smallest.
        """
        losses = {rate: self.of(method, rate, 0)[0] for rate in sorted(rates)}
        for _ in range(_MOST_EXTENSIONS):
            best = min(losses, key=losses.__getitem__)
            if best == max(losses):
                further = 2 * best
            elif best == min(losses):
                further = best / 2
            else:
                break
            losses[further] = self.of(method, further, 0)[0]
        return min(losses, key=losses.__getitem__), losses


def loss_section(
    setting: Setting, methods: Sequence[str], rates: Sequence[float], seeds: int
) -> Section:
    """Tune each method, train the other seeds at its rate, and compare.

    Args:
        setting: The settings of all trainings.
        methods: The methods, `allreduce` first.
        rates: Learning rates to begin with.
        seeds: Trainings of each method at its best rate, the one that chose it included.
    """
    losses = Losses(setting)
    rows, tuning, means = [], [], {}
    for method in methods:
        rate, by_rate = losses.tune(method, rates)
        runs = [losses.of(method, rate, seed) for seed in range(seeds)]
        finals = [loss for loss, _ in runs]
        means[method] = statistics.fmean(finals)
        rows.append(
            [
                method,
                f"{rate:g}",
                f"{means[method]:.4f} ({min(finals):.4f}-{max(finals):.4f})",
                f"{means[method] - means['allreduce']:+.4f}",
                f"{statistics.fmean(distance for _, distance in runs):.2g}",
            ]
        )
        tried = ", ".join(f"{loss:.4f} at {rate:g}" for rate, loss in sorted(by_rate.items()))
        tuning.append(f"- {method}: {tried}")
    tokens = setting.batch_size * setting.block_size
    lines = [
        f"GPT-Neo of {setting.layers} layers, width {setting.width}, on characters; "
        f"{setting.ranks} simulated ranks in nodes of {setting.ranks_per_node}, {tokens:,} "
        f"characters a step over all of them, {setting.steps} steps. Gossip by AccumAdamW with "
        f"moments of {setting.accum_steps} steps, or by AdamW where the name says so; DiLoCo with "
        f"{setting.sync_every} inner steps. Means of {seeds} seeds, smallest and largest in "
        "brackets.",
        "",
        *table(
            ("method", "best rate", "final validation loss", "to allreduce", "distance from mean"),
            rows,
        ),
        "",
        "Validation loss of the seed that chose the rate:",
        "",
        *tuning,
    ]
    return Section(title="Final loss", lines=lines)
