"""What a step costs with each optimizer of `benchmarks.kfac`, all stepping in turns in one process.

python -m benchmarks.kfac_steps '{"methods": ["adamw", "ekfac"], "width": 256, ...}' prints a JSON
object: the milliseconds of each step by method.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.kfac_costs import Taken
from benchmarks.kfac_run import Stepper, Text, make_model
from llm.models.loss import LanguageModelLoss
from llm.runtime.cpu import restart_with_kept_memory


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
        with self._stepper.capture_stats(inputs.numel()):
            objective, _ = self._loss(inputs, labels)
            (objective / inputs.numel()).backward()
        self._stepper.step(self._model, self._rate)
        return 1000 * (time.perf_counter() - began)


def train(options: dict[str, Any]) -> Taken:
    """Step every method on the same batches, one after the other; see the module.

    What K-FAC does more often in its first steps is done on batches of one sample, which do not
    count: the figures are those of whole intervals between inverses in the long run.
    """
    path, block_size = Path(options["text"]), options["block_size"]
    text = Text(path, batch_size=options["batch_size"], block_size=block_size)
    small = Text(path, batch_size=1, block_size=block_size)
    trainings = {
        method: Training(options, method, len(text.vocab)) for method in options["methods"]
    }
    generator = torch.Generator().manual_seed(0)
    interval = max(options["inv_update_steps"], options["factor_update_steps"])
    beginning = 1 << (interval - 1).bit_length()
    # The last two of them are whole: memory and threads have then seen a full batch.
    for step in range(beginning):
        batch = (text if step >= beginning - 2 else small).batch("train", generator)
        for training in trainings.values():
            training.step(*batch)
    taken: dict[str, list[float]] = {method: [] for method in trainings}
    order = list(trainings)
    for _ in range(-(-options["turns"] // interval) * interval):
        batch = text.batch("train", generator)
        for method in order:
            taken[method].append(trainings[method].step(*batch))
        # Who comes first finds the memory as the last has left it: each does so as often.
        order = [*order[1:], order[0]]
    return taken


if __name__ == "__main__":
    restart_with_kept_memory()  # as the trainer does
    print(json.dumps(train(json.loads(sys.argv[1]))))
