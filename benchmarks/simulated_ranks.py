"""Trains replicas side by side in one process, as ranks would, to compare their final losses.

The tests show that ranks on a network compute what such a simulation computes; here it saves the
processes. Models, optimizers, rounds and DiLoCo's outer step are those of the trainer.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call, grad, vmap
from transformers import GPTNeoConfig

from benchmarks.kfac_run import BETAS, WEIGHT_DECAY, Text, validation_loss
from llm.models.build import build_model
from llm.models.loss import LanguageModelLoss
from llm.models.options import ModelOptions
from llm.optim.accum_adamw import AccumAdamW
from llm.optim.groups import decays
from llm.optim.options import OptimizerOptions
from llm.optim.schedule import make_schedule
from llm.parallel.gossip.diloco import OuterOptimizer
from llm.parallel.gossip.rounds import TOPOLOGIES, make_rounds, mixing_matrix
from llm.parallel.options import DecentralizedOptions

MAX_GRAD_NORM = 1.0


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What all trainings have in common.

    Attributes:
        text: A text, read as characters.
        ranks: Simulated ranks; a step's samples are shared out among them.
        ranks_per_node: How many share a node.
        steps: Optimizer steps.
        batch_size: Samples of a step, of all ranks together.
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
        weights: By name, float32 [replicas, ...].

    Args:
        setting: Of all trainings.
        number: How many models; they start equal.
        vocab_size: Characters of the text.
        seed: Of the start.
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
        """Of the optimizer of all models: what it does to a weight depends on no other weight."""
        named = list(self._loss.named_parameters())
        return [
            {
                "params": [self.weights[name] for name, p in named if decays(name, p) == decayed],
                "weight_decay": WEIGHT_DECAY if decayed else 0.0,
            }
            for decayed in (True, False)
        ]

    def compute_gradients(self, inputs: Tensor, labels: Tensor) -> None:
        """Each model's own, of its share of the samples, clipped by its own norm."""
        gradients = self._gradient(
            self.weights,
            inputs.view(self.number, -1, inputs.shape[1]),
            labels.view(self.number, -1, labels.shape[1]),
        )
        squares = sum(g.flatten(1).square().sum(dim=1) for g in gradients.values())
        factor = torch.clamp(MAX_GRAD_NORM / (squares.sqrt() + 1e-6), max=1.0)
        for name, gradient in gradients.items():
            shape = (self.number, *[1] * (gradient.ndim - 1))
            # The fused optimizers take the memory of gradients and weights to be laid out alike.
            self.weights[name].grad = (gradient * factor.view(shape)).contiguous()

    def mix(self, matrix: Tensor) -> None:
        """`x_i <- sum_j W[i, j] x_j`."""
        for weight in self.weights.values():
            weight.copy_((matrix @ weight.flatten(1)).view_as(weight))

    def mean(self) -> dict[str, Tensor]:
        """The mean of the models' weights."""
        return {name: weight.mean(dim=0) for name, weight in self.weights.items()}

    def distance(self) -> float:
        """How far the models are from their mean, as the trainer logs it."""
        mean = self.mean()
        apart = sum(
            float((w - mean[name]).square().sum()) / self.number for name, w in self.weights.items()
        )
        return math.sqrt(apart / sum(float(m.square().sum()) for m in mean.values()))

    @torch.no_grad()
    def validation_loss(self, text: Text) -> float:
        """That of the mean of the weights, in nats a character."""
        for name, parameter in self._loss.named_parameters():
            parameter.copy_(self.weights[name].mean(dim=0))
        return validation_loss(self._loss, text)


def _make_loss(setting: Setting, *, vocab_size: int, seed: int) -> LanguageModelLoss:
    config = GPTNeoConfig(
        vocab_size=vocab_size,
        hidden_size=setting.width,
        num_layers=setting.layers,
        num_heads=4,
        attention_types=[[["global"], setting.layers]],
        max_position_embeddings=setting.block_size,
        **dict.fromkeys(("resid_dropout", "embed_dropout", "attention_dropout"), 0.0),
    )
    # Without the kernels that torch.func cannot look into.
    model = build_model(
        ModelOptions(fused_gelu=False, tied_gradients=False),
        config,
        weights_from=None,
        seed=seed,
        device=torch.device("cpu"),
        vocab_size=vocab_size,
    )
    return LanguageModelLoss(model, chunked=False)


def train(setting: Setting, method: str, *, learning_rate: float, seed: int) -> tuple[float, float]:
    """Train by a method from a seed's start, on the same samples whatever the method.

    Args:
        setting: Of all trainings.
        method: `allreduce`, a topology, a topology with `-adamw`, or `diloco`.
        learning_rate: Peak of a cosine with warm-up.
        seed: Of the weights and the samples.

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
            num_warmup_steps=setting.steps // 10,
        ),
        total_steps=setting.steps,
        global_batch_size=setting.batch_size,
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
        self._optimizer = OuterOptimizer(
            DecentralizedOptions(sync_every=1), self._mean, world_size=1
        )
        self._optimizer.before_step()

    def after_step(self, step: int) -> None:
        """Count a step; all replicas go on from the outer one, if it is due."""
        if (step + 1) % self._sync_every == 0:
            for name, mean in self._replicas.mean().items():
                self._mean[name].copy_(mean)
            self._optimizer.after_step()
            for name, weight in self._replicas.weights.items():
                weight.copy_(self._mean[name].expand_as(weight))
            self._optimizer.before_step()
