"""Trainings by gossip, DiLoCo and all-reduce, in which all ranks' models are in one process.

Models, optimizers, rounds and DiLoCo's outer step are those of the trainer; the tests show that
ranks on a network compute the same. `python -m benchmarks.decentralized_loss` is the process of
trainings that `benchmarks.decentralized_report` starts.
"""

import functools
import math
import re
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import transformers
from torch import Tensor
from torch.func import functional_call, grad, vmap

from benchmarks.characters import BETAS, WEIGHT_DECAY, Text, make_model, validation_loss
from benchmarks.kfac_trainings import serve
from llm.errors import ConfigError
from llm.extensions.decentralized.accum_adamw import AccumAdamW
from llm.extensions.decentralized.diloco import OuterOptimizer
from llm.extensions.decentralized.modes import DiLoCo
from llm.extensions.decentralized.rounds import TOPOLOGIES, make_rounds
from llm.extensions.matrix_optim.fused import Fusion
from llm.extensions.matrix_optim.muon import MuonAndAdamW
from llm.models.loss import LanguageModelLoss
from llm.optim.groups import has_weight_decay, inner_matrices
from llm.optim.options import OptimizerOptions
from llm.optim.schedule import make_schedule
from tests.support.decentralized import mixing_matrix

MAX_GRAD_NORM = 1.0


@dataclass(frozen=True, kw_only=True)
class Method:
    """How replicas train, from a name such as `ring-accumadamw` or `diloco-30-muon`.

    Attributes:
        mode: `allreduce`, `diloco`, or a topology of gossip.
        optimizer: `adamw`, `accumadamw`, `accumadamw-power` with the betas to the power of the
            steps of a block, or `muon`.
        inner_steps: Of DiLoCo.
        outer_momentum: Of DiLoCo.
    """

    mode: str
    optimizer: str
    inner_steps: int
    outer_momentum: float


def parse_method(name: str) -> Method:
    """Return the method of a name: MODE, then INNER_STEPS of diloco, `low` and OPTIMIZER.

    MODE alone has AdamW; `low` is an outer momentum of 0.5 instead of 0.9.

    Raises:
        ConfigError: The name has another form.
    """
    pattern = (
        rf"(allreduce|{'|'.join(TOPOLOGIES)}|diloco-(\d+)(-low)?)(?:-({'|'.join(OPTIMIZERS)}))?"
    )
    match = re.fullmatch(pattern, name)
    if match is None:
        raise ConfigError(
            f"--methods {name} is none of allreduce, {', '.join(TOPOLOGIES)}, diloco-STEPS and "
            f"diloco-STEPS-low, with one of {', '.join(OPTIMIZERS)} after a hyphen or nothing."
        )
    mode, inner_steps, is_low, optimizer = match.groups()
    return Method(
        mode="diloco" if inner_steps else mode,
        optimizer=optimizer or "adamw",
        inner_steps=int(inner_steps or 0),
        outer_momentum=0.5 if is_low else 0.9,
    )


OPTIMIZERS = ("adamw", "accumadamw-power", "accumadamw", "muon")


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The settings that all trainings share.

    Attributes:
        text: A text, read as characters.
        ranks: Simulated ranks, among which a step's samples are divided.
        ranks_per_node: Ranks of a node.
        batch_size: Samples of a step over all ranks.
        block_size: Characters of a sample.
        width: Width of the model.
        layers: Layers of the model.
        accum_steps: Steps of a block of AccumAdamW.
        embedding_factor: Rate of embeddings, gains and biases over the rate of the matrices.
    """

    text: str
    ranks: int
    ranks_per_node: int
    batch_size: int
    block_size: int
    width: int
    layers: int
    accum_steps: int
    embedding_factor: float


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

    @property
    def matrices(self) -> dict[Tensor, int]:
        """The weights of matrices inside the layers, [replicas, outputs, inputs]: the outputs."""
        inner = set(inner_matrices(self._loss))
        return {
            self.weights[name]: p.shape[0]
            for name, p in self._loss.named_parameters()
            if p in inner
        }

    def groups(self, embedding_factor: float) -> list[dict[str, Any]]:
        """Return the parameter groups of one element-wise optimizer for all models.

        Args:
            embedding_factor: Rate of all weights but the matrices over the rate of the matrices.
        """
        named, matrices = list(self._loss.named_parameters()), self.matrices
        groups = [
            {
                "params": [
                    self.weights[name]
                    for name, p in named
                    if has_weight_decay(name, p) is is_decayed
                    and (self.weights[name] in matrices) is inner
                ],
                "weight_decay": WEIGHT_DECAY if is_decayed else 0.0,
                "rate_factor": 1.0 if inner else embedding_factor,
            }
            for is_decayed, inner in ((True, True), (True, False), (False, False))
        ]
        return [group for group in groups if group["params"]]

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
    return LanguageModelLoss(model, is_chunked=False)


def train(
    setting: Setting, method: str, *, steps: int, learning_rate: float, seed: int
) -> tuple[float, float]:
    """Train by a method; the samples depend only on the seed.

    Args:
        setting: The settings of all trainings.
        method: As `parse_method` reads it.
        steps: Optimizer steps.
        learning_rate: Peak of a cosine with warm-up.
        seed: Seed of the weights and the samples.

    Returns:
        Validation loss of the mean of the weights, in nats a character, and the distance of ranks
        from that mean.
    """
    parsed = parse_method(method)
    text = _open_text(setting)
    number = 1 if parsed.mode == "allreduce" else setting.ranks
    replicas = _Replicas(setting, number, vocab_size=len(text.vocab), seed=seed)
    optimizer = _make_optimizer(setting, parsed.optimizer, replicas, learning_rate)
    matrices: list[Tensor] = []
    if parsed.mode in TOPOLOGIES:
        rounds = make_rounds(
            parsed.mode, num_ranks=setting.ranks, ranks_per_node=setting.ranks_per_node
        )
        matrices = [torch.from_numpy(mixing_matrix(groups)).float() for groups in rounds]
    outer = _Outer(replicas, parsed) if parsed.mode == "diloco" else None
    schedule = make_schedule(
        OptimizerOptions(
            lr_scheduler_type="cosine",
            learning_rate=learning_rate,
            min_learning_rate=0.1 * learning_rate,
        ),
        total_steps=steps,
        warmup_steps=steps // 10,
    )
    generator = torch.Generator().manual_seed(seed)
    for step in range(steps):
        replicas.compute_gradients(*text.batch("train", generator))
        if matrices and step > 0:  # the exchange that began after the last step
            replicas.mix(matrices[(step - 1) % len(matrices)])
        for group in optimizer.param_groups:
            group["lr"] = schedule(step) * group["rate_factor"]
        optimizer.step()
        if outer is not None:
            outer.after_step(step)
    return replicas.validation_loss(text), replicas.distance()


@functools.cache
def _open_text(setting: Setting) -> Text:
    return Text(Path(setting.text), batch_size=setting.batch_size, block_size=setting.block_size)


def _make_optimizer(
    setting: Setting, name: str, replicas: _Replicas, learning_rate: float
) -> torch.optim.Optimizer:
    groups = replicas.groups(setting.embedding_factor)
    if name == "muon":
        fusions: Any = {
            weight: Fusion(sizes={"": outputs}, dim=1)
            for weight, outputs in replicas.matrices.items()
        }
        return MuonAndAdamW(groups, fusions, lr=learning_rate, betas=BETAS, fusions=fusions)
    if name == "adamw":
        return torch.optim.AdamW(groups, lr=learning_rate, betas=BETAS, eps=1e-8, fused=True)
    power = setting.accum_steps if name == "accumadamw-power" else 1
    return AccumAdamW(
        groups,
        lr=learning_rate,
        betas=(BETAS[0] ** power, BETAS[1] ** power),
        eps=1e-8,
        accum_steps=setting.accum_steps,
    )


class _Outer:
    """DiLoCo's outer step on the mean of the replicas."""

    def __init__(self, replicas: _Replicas, method: Method) -> None:
        self._replicas = replicas
        self._inner_steps = method.inner_steps
        self._mean = replicas.mean()
        settings = DiLoCo(
            inner_steps=1, outer_learning_rate=0.7, outer_momentum=method.outer_momentum
        )
        self._optimizer = OuterOptimizer(settings, self._mean, world_size=1)
        self._optimizer.before_step()

    def after_step(self, step: int) -> None:
        """Count a step; if an outer step is due, take it and give its result to all replicas."""
        if (step + 1) % self._inner_steps == 0:
            for name, mean in self._replicas.mean().items():
                self._mean[name].copy_(mean)
            self._optimizer.after_step()
            for name, weight in self._replicas.weights.items():
                weight.copy_(self._mean[name].expand_as(weight))
            self._optimizer.before_step()


def train_case(case: dict[str, Any]) -> tuple[float, float]:
    """Train a case: the fields of a `Setting`, and the arguments of `train` by their names."""
    names = [field.name for field in fields(Setting)]
    setting = Setting(**{name: case[name] for name in names})
    arguments = ("method", "steps", "learning_rate", "seed")
    return train(setting, **{name: case[name] for name in arguments})


if __name__ == "__main__":
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    serve({"train": train_case})
