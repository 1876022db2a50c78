"""What a step costs with each optimizer of `benchmarks.kfac`, all stepping in turns in one process.

python -m benchmarks.kfac_steps '{"methods": ["adamw", "ekfac"], "width": 256, ...}' prints a JSON
object: the milliseconds of each step by method.
"""

import json
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.kfac_run import Stepper, Text, make_model
from benchmarks.report import Goal, Section, at_most, table
from llm.allocator import restart_with_kept_memory
from llm.models.loss import LanguageModelLoss


class Training:
    """One method's model on its way, a step at a time.

    Args:
        options: As those of `benchmarks.kfac_run`.
        method: The optimizer.
        vocab_size: Characters of the text.
    """

    def __init__(self, options: dict[str, Any], method: str, vocab_size: int) -> None:
        model = make_model(options, vocab_size)
        self._model, self._loss = model, LanguageModelLoss(model)
        self._stepper = Stepper(options | {"method": method}, model)
        self._rate = float(options["learning_rate"])

    def step(self, inputs: torch.Tensor, labels: torch.Tensor) -> float:
        """Train on one batch; returns the milliseconds that it took."""
        began = time.perf_counter()
        with self._stepper.recording(inputs.numel()):
            objective, _ = self._loss(inputs, labels)
            (objective / inputs.numel()).backward()
        self._stepper.step(self._model, self._rate)
        return 1000 * (time.perf_counter() - began)


def train(options: dict[str, Any]) -> dict[str, list[float]]:
    """Step every method on the same batches, one after the other; see the module.

    What K-FAC does more often in its first steps is done on batches of one sample, which do not
    count: the figures are those of one whole interval between inverses in the long run.
    """
    path, block_size = Path(options["text"]), options["block_size"]
    text = Text(path, batch_size=options["batch_size"], block_size=block_size)
    small = Text(path, batch_size=1, block_size=block_size)
    trainings = {
        method: Training(options, method, len(text.vocab)) for method in options["methods"]
    }
    generator = torch.Generator().manual_seed(0)
    interval = max(options["inv_update_steps"], options["factor_update_steps"])
    # The last two of them are whole: memory and threads have then seen a full batch.
    for step in range(interval):
        batch = (text if step >= interval - 2 else small).batch("train", generator)
        for training in trainings.values():
            training.step(*batch)
    taken: dict[str, list[float]] = {method: [] for method in trainings}
    order = list(trainings)
    for _ in range(interval):
        batch = text.batch("train", generator)
        for method in order:
            taken[method].append(trainings[method].step(*batch))
        # Who comes first finds the memory as the last has left it: each does so as often.
        order = [*order[1:], order[0]]
    return taken


def section(
    title: str, taken: Mapping[str, Sequence[float]], rows: Mapping[str, str], bound: float
) -> Section:
    """Table and goals of one model's figures.

    Args:
        title: The model in words.
        taken: Milliseconds of each step by method, adamw among them.
        rows: Other names of methods for the table.
        bound: What ekfac's mean step may cost at most, in steps of AdamW.
    """
    # Steps of the same turn are neighbours in time: what slows the machine down slows both.
    ratios = {
        method: [own / other for own, other in zip(times, taken["adamw"], strict=True)]
        for method, times in taken.items()
    }
    cost = {method: statistics.fmean(of) for method, of in ratios.items()}
    spike = {method: max(of) / statistics.median(of) for method, of in ratios.items()}
    lines = table(
        ["method", "median ms a step", "mean, AdamW's step = 1", "slowest, median = 1"],
        [
            [
                rows.get(method, method),
                f"{statistics.median(times):.0f}",
                f"{cost[method]:.2f}",
                f"{spike[method]:.2f}",
            ]
            for method, times in taken.items()
        ],
    )
    goals: list[Goal] = []
    if "ekfac" in taken:
        goals = [
            at_most(f"{title}: ekfac's step", cost["ekfac"], bound, " of AdamW's"),
            at_most(f"{title}: ekfac's slowest step", spike["ekfac"], 2, " of its median"),
        ]
        if "eigen-compat" in taken:
            ratio = cost["ekfac"] / cost["eigen-compat"]
            goals.append(at_most(f"{title}: ekfac's step", ratio, 1, " of kfac-pytorch's way"))
    return Section(title=title, lines=lines, goals=goals)


if __name__ == "__main__":
    restart_with_kept_memory()  # as the trainer does
    print(json.dumps(train(json.loads(sys.argv[1]))))
