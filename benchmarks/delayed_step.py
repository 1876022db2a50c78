"""One rank that measures steps on a slow link, started by `benchmarks.decentralized_delay`.

The model's layers, gradients and messages are real. The compute time is slept, as a processor waits
for an accelerator, so that ranks on few cores do not wait for one another's arithmetic.
"""

import json
import statistics
import sys
import time
from typing import Any

import torch
from torch import Tensor, nn

from llm.data.loader import MicroBatch
from llm.extensions.decentralized.accum_adamw import make_accum_adamw
from llm.extensions.decentralized.decentralized import DecentralizedStrategy
from llm.extensions.decentralized.modes import DiLoCo, Gossip
from llm.extensions.decentralized.rounds import make_rounds
from llm.optim.adamw_and_sgd import make_adamw
from llm.optim.options import OptimizerOptions
from llm.optim.run_optimizer import OptimizerFactory
from llm.parallel.accelerator import make_accelerator
from llm.parallel.base import AcceleratedStrategy
from llm.parallel.options import PrecisionOptions


class _Compute(torch.autograd.Function):
    """Sleeps in the forward pass, and twice as long in the backward pass."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return values.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        time.sleep(2 * ctx.seconds)
        return gradients[0], None


class _Loss(nn.Module):
    """A stack of layers in place of a model and its loss.

    Args:
        layers: Number of layers.
        width: Each layer has width x width weights.
        seconds: Time of a step's passes.
    """

    names = ("loss",)

    def __init__(self, *, layers: int, width: int, seconds: float) -> None:
        super().__init__()
        self.model = nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(layers)])
        self._seconds = seconds / layers / 3

    def forward(self, inputs: Tensor, *_: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the summed loss of inputs [batch, width], and the sums for the log."""
        for layer in self.model:
            inputs = _Compute.apply(layer(inputs), self._seconds)  # type: ignore[no-untyped-call]
        loss = inputs.square().sum()
        return loss, loss.detach()[None]

    def zero_sums(self, device: torch.device) -> Tensor:
        """Return zeros for the sums."""
        return torch.zeros(1, device=device)


def make_strategy(options: dict[str, Any]) -> AcceleratedStrategy:
    """Make the strategy of a mode as the trainer does."""
    torch.manual_seed(0)
    accelerator = make_accelerator(PrecisionOptions(), device=torch.device("cpu"))
    ranks, mode = accelerator.num_processes, options["mode"]
    loss = _Loss(layers=options["layers"], width=options["width"], seconds=options["compute"])
    adamw = OptimizerOptions(learning_rate=1e-3, weight_decay=0.1, betas=(0.9, 0.95))
    if mode == "allreduce":
        strategy = AcceleratedStrategy(accelerator)
    elif mode == "diloco":
        diloco = DiLoCo(
            inner_steps=options["sync_every"], outer_learning_rate=0.7, outer_momentum=0.9
        )
        strategy = DecentralizedStrategy(diloco, accelerator)
    else:
        rounds = make_rounds(mode, num_ranks=ranks, ranks_per_node=options["ranks_per_node"])
        strategy = DecentralizedStrategy(Gossip(rounds=rounds), accelerator)
    if mode in ("allreduce", "diloco"):
        factory = OptimizerFactory(lambda model: make_adamw(adamw, model))
    else:
        factory = OptimizerFactory(
            lambda model: make_accum_adamw(adamw, model, accum_steps=min(8, ranks))
        )
    strategy.prepare(loss, factory.make)
    return strategy


def step(strategy: AcceleratedStrategy, width: int) -> None:
    """Do what the trainer's loop does in a step without a report."""
    inputs = torch.ones(1, width)
    strategy.forward_backward([MicroBatch(inputs, inputs)], num_tokens=1)
    strategy.optimizer_step(1.0)
    strategy.reduce_flags([False, False])


def main() -> None:
    """Run phases of steps; rank 0 reads a line before each and prints its step time."""
    options = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    strategy = make_strategy(options)
    for phase in range(options["phases"]):
        strategy.barrier()
        if strategy.rank == 0:
            print(json.dumps({"phase": phase}), flush=True)
            sys.stdin.readline()
        strategy.barrier()
        times = []
        for _ in range(options["steps"] + options["warmup"]):
            began = time.perf_counter()
            step(strategy, options["width"])
            times.append(time.perf_counter() - began)
        counted = times[options["warmup"] :]
        # The mean for DiLoCo, whose outer steps take longer than the others.
        middle = statistics.fmean if options["mode"] == "diloco" else statistics.median
        seconds = middle(counted)
        if strategy.rank == 0:
            print(json.dumps({"seconds": seconds}), flush=True)
    strategy.barrier()
    strategy.close()


if __name__ == "__main__":
    main()
