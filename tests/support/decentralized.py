"""A model small enough to simulate all ranks in one process, in float64, and its strategies."""

import dataclasses

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from llm.data.loader import MicroBatch
from llm.extensions.decentralized.accum_adamw import make_accum_adamw
from llm.extensions.decentralized.decentralized import DecentralizedStrategy
from llm.extensions.decentralized.modes import DiLoCo, Gossip
from llm.extensions.decentralized.rounds import Round, make_rounds
from llm.extensions.matrix_optim.muon import make_muon
from llm.optim.adamw_and_sgd import make_adamw
from llm.optim.groups import parameter_groups
from llm.optim.run_optimizer import OptimizerFactory
from llm.parallel import flat_buffers
from llm.parallel.base import AcceleratedStrategy
from llm.trainers.gpt.extensions import GPTConfig
from tests.support.layouts import cpu_accelerator

VOCAB, WIDTH, LENGTH, BATCH = 11, 4, 5, 24


def mixing_matrix(groups: Round) -> np.ndarray:
    """Return W of a round, float64 [ranks, ranks]: `x_i <- sum_j W[i, j] x_j`."""
    ranks = sum(map(len, groups))
    matrix = np.zeros((ranks, ranks))
    for group in groups:
        matrix[np.ix_(group, group)] = 1 / len(group)
    return matrix


class Model(nn.Module):
    """Tied embeddings, a frozen matrix, a gain, and on demand a parameter that nothing uses."""

    def __init__(self, *, unused: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.middle = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB)
        self.head.weight = self.embedding.weight
        if unused:
            self.unused = nn.Linear(WIDTH, 2)
        self.register_buffer("scale", torch.ones(()))
        self.double()


class Loss(nn.Module):
    """What strategies expect: the model's summed loss in one forward."""

    names = ("loss",)

    def __init__(self, *, unused: bool = True) -> None:
        super().__init__()
        self.model = Model(unused=unused)

    def forward(self, input_ids, labels, *unused):
        model = self.model
        hidden = model.embedding(input_ids) * model.scale
        hidden = torch.tanh(model.middle(hidden) + model.frozen(hidden))
        loss = F.cross_entropy(model.head(hidden).flatten(0, 1), labels.flatten(), reduction="sum")
        return loss, loss.detach()[None]

    def zero_sums(self, device):
        return torch.zeros(1, device=device)


@dataclasses.dataclass(frozen=True)
class Case:
    """How to train."""

    topology: str = "ring"
    optimizer: str = "sgd"
    overlap: bool = True
    ranks_per_node: int = 1
    nodes: bool = False
    sync_every: int | None = None
    max_grad_norm: float = 0.0
    accumulation: int = 1
    buffer_bytes: int = 100
    unused: bool = True
    steps: int = 7


def make_optimizer(name: str, model: nn.Module) -> torch.optim.Optimizer:
    options = GPTConfig(optimizer=name, learning_rate=0.03, weight_decay=0.1, betas=(0.9, 0.95))
    if name == "adamw":
        return make_adamw(options, model)
    if name == "accumadamw":
        return make_accum_adamw(options, model, accum_steps=3)
    if name in ("muon", "normuon"):
        return make_muon(options, model)
    groups = parameter_groups(options, model)
    return torch.optim.SGD(groups, lr=0.5, fused=True)


def step_data(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(VOCAB, (BATCH, LENGTH + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def trained(model: nn.Module) -> torch.Tensor:
    """The trained weights in one vector."""
    return torch.cat([p.detach().flatten() for p in model.parameters() if p.requires_grad])


def make_strategy(case: Case, mixed_precision: str = "no") -> DecentralizedStrategy:
    """A prepared strategy on the ranks that there are."""
    flat_buffers.MAX_BUFFER_BYTES = case.buffer_bytes
    accelerator = cpu_accelerator(mixed_precision)
    each = case.ranks_per_node if case.nodes else 1
    rounds = make_rounds(
        case.topology,
        num_ranks=accelerator.num_processes // each,
        ranks_per_node=1 if case.nodes else case.ranks_per_node,
    )
    averaging: Gossip | DiLoCo = Gossip(rounds=rounds, overlap=case.overlap)
    if case.sync_every is not None:
        averaging = DiLoCo(inner_steps=case.sync_every, outer_learning_rate=0.7, outer_momentum=0.9)
    strategy = DecentralizedStrategy(averaging, accelerator, ranks_per_replica=each)
    loss = Loss(unused=case.unused)
    strategy.prepare(
        loss, OptimizerFactory(lambda model: make_optimizer(case.optimizer, model)).make
    )
    return strategy


def train(strategy: AcceleratedStrategy, case: Case, steps: range) -> None:
    """Train a strategy on this rank's share of each step's data."""
    for step in steps:
        input_ids, labels = step_data(step)
        ids = input_ids.chunk(strategy.world_size)[strategy.rank].chunk(case.accumulation)
        wanted = labels.chunk(strategy.world_size)[strategy.rank].chunk(case.accumulation)
        parts = [MicroBatch(*part) for part in zip(ids, wanted, strict=True)]
        strategy.forward_backward(parts, num_tokens=labels.numel())
        strategy.optimizer_step(case.max_grad_norm)


def finish(strategy: AcceleratedStrategy) -> None:
    """Wait for messages, and for all ranks: the first one must not leave the others alone."""
    if isinstance(strategy, DecentralizedStrategy):
        strategy._averager.wait_for_messages()
    strategy.barrier()


RING = Case(topology="ring", optimizer="accumadamw")
DILOCO = Case(optimizer="adamw", sync_every=3)
