"""Compare our step with that of a plain Hugging Face loop, at toy size, for every tested family.

python -m benchmarks.families [--families gpt2 llama] [--steps 100]
"""

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.report import (
    ReportOptions,
    Section,
    at_most,
    machine,
    render,
    run_benchmark,
    table,
)
from llm.config.options import option
from llm.optim.run_optimizer import OptimizerFactory

_BATCH, _LENGTH = 4, 64


@dataclass(frozen=True, kw_only=True)
class FamiliesBenchmarkOptions(ReportOptions):
    """Options of the benchmark."""

    families: tuple[str, ...] = option((), "Families; by default all.", group="Run")
    steps: int = option(100, "Steps of each, ten at a time.", group="Run", at_least=10)


def our_step(family: str) -> Callable[[], None]:
    """Return a step of the trainer's strategy, without data and log."""
    import torch

    from llm.data.loader import MicroBatch
    from llm.models.build import build_model
    from llm.models.loss import LanguageModelLoss
    from llm.models.options import ModelOptions
    from llm.optim.adamw_and_sgd import make_adamw
    from llm.optim.options import OptimizerOptions
    from llm.parallel.accelerator import make_accelerator
    from llm.parallel.base import AcceleratedStrategy
    from llm.parallel.options import PrecisionOptions
    from tests.support.models import tiny_config

    config = tiny_config(family)
    device = torch.device("cpu")
    model = build_model(
        ModelOptions(),
        config,
        weights_from=None,
        seed=1,
        device=device,
        vocab_size=config.get_text_config().vocab_size,
    )
    strategy = AcceleratedStrategy(make_accelerator(PrecisionOptions(), device=device))
    options = OptimizerOptions(learning_rate=1e-3, weight_decay=0.1)
    strategy.prepare(
        LanguageModelLoss(model), OptimizerFactory(lambda module: make_adamw(options, module)).make
    )
    inputs, labels = _tokens(config.get_text_config().vocab_size)
    batch = [MicroBatch(inputs, labels)]

    def step() -> None:
        strategy.forward_backward(batch, num_tokens=_BATCH * _LENGTH)
        strategy.optimizer_step(1.0)

    return step


def plain_step(family: str) -> Callable[[], None]:
    """Return the same step as the libraries' introductions write it."""
    import torch
    from transformers import AutoModelForCausalLM

    from tests.support.models import tiny_config

    config = tiny_config(family)
    model = AutoModelForCausalLM.from_config(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    ids, _ = _tokens(config.get_text_config().vocab_size)

    def step() -> None:
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return step


def _tokens(vocab_size: int) -> tuple[Any, Any]:
    import torch

    ids = torch.randint(
        vocab_size, (_BATCH, _LENGTH + 1), generator=torch.Generator().manual_seed(0)
    )
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def times(steps: Sequence[Callable[[], None]], number: int) -> list[float]:
    """Return the median seconds of each kind of step, ten of each alternately."""
    found: list[list[float]] = [[] for _ in steps]
    for _ in range(-(-number // 10)):
        for step, seconds in zip(steps, found, strict=True):
            for _ in range(10):
                began = time.perf_counter()
                step()
                seconds.append(time.perf_counter() - began)
    return [statistics.median(seconds) for seconds in found]


def report(options: FamiliesBenchmarkOptions, _: Path) -> str:
    """Measure all families and return the report."""
    from tests.support.models import FAMILIES

    rows, ratios = [], []
    for family in options.families or FAMILIES:
        ours, plain = times([our_step(family), plain_step(family)], options.steps)
        ratios.append(ours / plain)
        rows.append([family, f"{1000 * ours:.1f}", f"{1000 * plain:.1f}", f"{ours / plain:.2f}"])
    section = Section(
        title=f"{_BATCH} x {_LENGTH} tokens a step, ms",
        lines=table(["family", "llm", "plain loop", "llm / plain"], rows),
        goals=[at_most("the slowest family over a plain loop", max(ratios), 1.0, "x")],
    )
    return render("Families", machine(["torch", "transformers"]), [section])


if __name__ == "__main__":
    sys.exit(
        run_benchmark(
            "families",
            "Compares our step with a plain Hugging Face loop's, for every family.",
            FamiliesBenchmarkOptions,
            report,
        )
    )
