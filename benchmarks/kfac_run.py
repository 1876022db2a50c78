"""The processes of `benchmarks.kfac`: a small GPT-Neo on characters, by one or several optimizers.

python -m benchmarks.kfac_run train '{"method": "ekfac", ...}' trains and prints a JSON object with
the validation loss at regular steps and after the last. `steps '{"methods": [...], ...}'` times the
steps of several methods, one after the other on the same batches, and prints the milliseconds of
each step by method. With a third argument `attached` both end when their input does.
"""

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import GPTNeoConfig

from benchmarks.kfac_report import Taken
from llm.models.build import build_model
from llm.models.loss import LanguageModelLoss
from llm.models.options import ModelOptions
from llm.optim.groups import parameter_groups
from llm.optim.kfac.make_kfac import KFAC, make_kfac
from llm.optim.make import make_optimizer
from llm.optim.options import OptimizerOptions
from llm.optim.schedule import make_schedule
from llm.runtime.cpu import restart_with_kept_memory

BETAS = (0.9, 0.95)
WEIGHT_DECAY = 0.1
_EVALUATION_BATCHES = 20


class Text:
    """A text as characters; its last tenth is for validation.

    Args:
        path: The file.
        batch_size: Samples of a step.
        block_size: Characters of a sample.
    """

    def __init__(self, path: Path, *, batch_size: int, block_size: int) -> None:
        text = path.read_text(encoding="utf-8")
        self.vocab = sorted(set(text))
        number = {character: i for i, character in enumerate(self.vocab)}
        ids = torch.tensor([number[character] for character in text])
        cut = int(0.9 * len(ids))
        self.parts = {"train": ids[:cut], "validation": ids[cut:]}
        self.shape = (batch_size, block_size)

    def batch(self, part: str, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        """Return random windows and the next characters, each [batch_size, block_size]."""
        ids, (batch_size, block_size) = self.parts[part], self.shape
        starts = torch.randint(len(ids) - block_size - 1, (batch_size, 1), generator=generator)
        windows = ids[starts + torch.arange(block_size + 1)]
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


def make_model(
    *,
    width: int,
    layers: int,
    block_size: int,
    vocab_size: int,
    seed: int,
    options: ModelOptions | None = None,
) -> Any:
    """Build the GPT-Neo of the comparisons; the seed determines its initial weights."""
    config = GPTNeoConfig(
        vocab_size=vocab_size,
        hidden_size=width,
        num_layers=layers,
        num_heads=4,
        attention_types=[[["global"], layers]],
        max_position_embeddings=block_size,
        **dict.fromkeys(("resid_dropout", "embed_dropout", "attention_dropout"), 0.0),
    )
    return build_model(
        options or ModelOptions(),
        config,
        weights_from=None,
        seed=seed,
        device=torch.device("cpu"),
        vocab_size=vocab_size,
    )


def model_of(settings: dict[str, Any], vocab_size: int) -> Any:
    """Build the model of a training from its settings."""
    sizes = {name: settings[name] for name in ("width", "layers", "block_size", "seed")}
    return make_model(vocab_size=vocab_size, **sizes)


class Stepper:
    """An optimizer, with K-FAC before or around it for some methods."""

    def __init__(self, options: dict[str, Any], model: Any) -> None:
        self._kfac: KFAC | None = None
        self.optimizer: torch.optim.Optimizer
        method = options["method"]
        settings: dict[str, Any] = {
            "learning_rate": options["learning_rate"],
            "weight_decay": WEIGHT_DECAY,
            "betas": BETAS,
        }
        if method in ("ekfac", "eigen-compat"):
            is_ekfac = method == "ekfac"
            kfac = OptimizerOptions(
                **settings,
                kfac=True,
                kfac_compat=not is_ekfac,
                kfac_factor_update_steps=options["factor_update_steps"],
                kfac_inv_update_steps=options["inv_update_steps"],
                kfac_max_dim=options["max_dim"] if is_ekfac else None,
            )
            self._kfac = make_kfac(kfac, model, torch_compile=False)
            self.optimizer = self._kfac.optimizer
        elif method == "soap":
            from pytorch_optimizer import SOAP

            self.optimizer = SOAP(
                parameter_groups(model, weight_decay=WEIGHT_DECAY),
                lr=settings["learning_rate"],
                betas=BETAS,
                precondition_frequency=options["soap_update_steps"],
            )
        else:
            self.optimizer = make_optimizer(OptimizerOptions(**settings, optimizer=method), model)

    def capture_stats(self, tokens: int) -> contextlib.AbstractContextManager[None]:
        """Return the context for the passes of a step."""
        if self._kfac is None:
            return contextlib.nullcontext()
        return self._kfac.capture_stats(token_weight=1 / tokens, loss_scale=torch.ones(()))

    def step(self, model: Any, learning_rate: float) -> None:
        """Precondition, clip and update."""
        if self._kfac is not None:
            self._kfac.precondition(learning_rate=learning_rate)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.optimizer.step()
        self.optimizer.zero_grad()


def train(options: dict[str, Any]) -> dict[str, Any]:
    """Train and evaluate; return the curve of validation losses."""
    text = Text(
        Path(options["text"]), batch_size=options["batch_size"], block_size=options["block_size"]
    )
    model = model_of(options, len(text.vocab))
    loss = LanguageModelLoss(model)
    stepper = Stepper(options, model)
    steps, peak = options["steps"], options["learning_rate"]
    schedule: Callable[[int], float] = make_schedule(
        OptimizerOptions(
            lr_scheduler_type="cosine",
            learning_rate=peak,
            min_learning_rate=0.1 * peak,
            num_warmup_steps=steps // 20,
        ),
        total_steps=steps,
    )
    generator = torch.Generator().manual_seed(options["seed"])
    tokens = options["batch_size"] * options["block_size"]
    curve = []
    for step in range(steps):
        inputs, labels = text.batch("train", generator)
        with stepper.capture_stats(tokens):
            objective, _ = loss(inputs, labels)
            (objective / tokens).backward()
        stepper.step(model, schedule(step))
        if (step + 1) % options["evaluate_every"] == 0 or step + 1 == steps:
            curve.append([step + 1, validation_loss(loss, text)])
    return {"curve": curve}


@torch.no_grad()
def validation_loss(loss: LanguageModelLoss, text: Text) -> float:
    """Return the nats a character over the same windows each time."""
    generator = torch.Generator().manual_seed(0)
    total = sum(
        float(loss(*text.batch("validation", generator))[1]) for _ in range(_EVALUATION_BATCHES)
    )
    return total / (_EVALUATION_BATCHES * text.shape[0] * text.shape[1])


class Training:
    """A model in training by one method, a step at a time.

    Args:
        options: The settings of the training.
        method: The optimizer.
        vocab_size: Characters of the text.
    """

    def __init__(self, options: dict[str, Any], method: str, vocab_size: int) -> None:
        model = model_of(options, vocab_size)
        self._model, self._loss = model, LanguageModelLoss(model)
        self._stepper = Stepper(options | {"method": method}, model)
        self._rate = float(options["learning_rate"])

    def step(self, inputs: torch.Tensor, labels: torch.Tensor) -> float:
        """Train on one batch; return the milliseconds of the step."""
        began = time.perf_counter()
        with self._stepper.capture_stats(inputs.numel()):
            objective, _ = self._loss(inputs, labels)
            (objective / inputs.numel()).backward()
        self._stepper.step(self._model, self._rate)
        return 1000 * (time.perf_counter() - began)


def time_steps(options: dict[str, Any]) -> Taken:
    """Time every method's steps on the same batches, one after the other.

    The first steps, in which K-FAC updates more often, run on batches of one sample and do not
    count: the figures are those of whole intervals between updates of the inverses.
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
    # The last two are full batches, so that memory and threads are warm.
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
        # Rotated, since the first method of a round finds the caches of the last one.
        order = [*order[1:], order[0]]
    return taken


def end_with_input() -> None:
    """End the process when its input ends, which is when the benchmark that began it has ended."""
    sys.stdin.read()
    os._exit(1)


if __name__ == "__main__":
    restart_with_kept_memory()  # as the trainer does
    if sys.argv[3:] == ["attached"]:
        threading.Thread(target=end_with_input, daemon=True).start()
    task = {"train": train, "steps": time_steps}[sys.argv[1]]
    print(json.dumps(task(json.loads(sys.argv[2]))))
