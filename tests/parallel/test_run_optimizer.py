"""What a strategy asks of the optimizer of a run, and when."""

import contextlib

import torch

from llm.models.loss import LanguageModelLoss
from llm.optim.run_optimizer import RunOptimizer
from llm.parallel.base import AcceleratedStrategy
from tests.support.layouts import cpu_accelerator, make_optimizer, share
from tests.support.models import still_model
from tests.support.ranks import run_ranks, values


class Noting(RunOptimizer):
    """Notes what it is asked, halves the gradient, and keeps one state on the last rank."""

    def __init__(self, optimizer):
        super().__init__(optimizer)
        self.notes = []

    @contextlib.contextmanager
    def record_passes(self, *, token_weight, loss_scale):
        self.notes.append(f"begin, scale {loss_scale().item():g}, weight 1 / {1 / token_weight:g}")
        yield
        self.notes.append("end")

    def before_clip(self, *, learning_rate):
        self.notes.append(f"before clip, rate {learning_rate:g}")
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad *= 0.5

    def owner_of(self, path):
        return 1 if path == "strategy/optimizer/lm_head.weight/exp_avg" else None


def step(make):
    """The gradient's norm, what was noted, and who owns three tensors."""
    strategy = AcceleratedStrategy(cpu_accelerator())
    strategy.prepare(LanguageModelLoss(still_model()), lambda model, mesh: make(model))
    strategy.set_learning_rate(0.25)
    micro_batches, num_tokens = share(0, strategy, 2)
    strategy.forward_backward(micro_batches, num_tokens=num_tokens)
    norm, _ = strategy.optimizer_step(1.0)
    paths = "optimizer/lm_head.weight/exp_avg", "optimizer/lm_head.weight/step", "model/lm_head"
    owners = [list(strategy.owner_ranks(f"strategy/{path}")) for path in paths]
    return norm.item(), getattr(strategy.run_optimizer, "notes", None), num_tokens, owners


def plain(model):
    return RunOptimizer(make_optimizer(model))


def noting(model):
    return Noting(make_optimizer(model))


def test_it_sees_the_passes_and_changes_the_gradient_that_is_clipped():
    expected, *_ = values(run_ranks(step, 2, plain))[0]
    for norm, notes, num_tokens, owners in values(run_ranks(step, 2, noting)):
        assert torch.isclose(torch.tensor(norm), torch.tensor(expected / 2))
        weight = f"weight 1 / {num_tokens / 2:g}"  # times the ranks, over which is averaged
        assert notes == [f"begin, scale 1, {weight}", "end", "before clip, rate 0.25"]
        assert owners == [[1], [0, 1], [0, 1]]
