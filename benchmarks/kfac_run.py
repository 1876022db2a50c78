"""The processes of `benchmarks.kfac`: a small Llama on tokens, by one or several optimizers.

A line of its input such as ["train", {"method": "ekfac", ...}] makes it train and print the
validation loss at the end. The task "steps" with {"methods": [...], ...} times the steps of several
methods, one after the other on the same batches, and prints the milliseconds of each by method.
"""

import contextlib
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import LlamaConfig

from benchmarks.kfac_report import StepTimes
from benchmarks.kfac_trainings import serve
from llm.models.build import build_model
from llm.models.loss import LanguageModelLoss
from llm.models.options import ModelOptions
from llm.optim.groups import parameter_groups
from llm.optim.options import OptimizerOptions
from llm.optim.run_optimizer import RunOptimizer
from llm.optim.schedule import make_schedule
from llm.runtime.process_settings import restart_with_kept_memory
from llm.trainers.gpt.extensions import GPTConfig
from llm.trainers.gpt.seams import choose_factory, make_extensions

WEIGHT_DECAY = 0.1
_VALIDATION_WINDOWS = 512


class Text:
    """Training and validation tokens, in windows that do not overlap.

    Args:
        path: A folder of nanoGPT's train.bin and val.bin, or a text, which is read as characters
            and whose last tenth is for validation.
        batch_size: Windows of a step.
        block_size: Tokens of a window.
        device: Where batches are.
    """

    def __init__(
        self, path: Path, *, batch_size: int, block_size: int, device: torch.device
    ) -> None:
        if path.is_dir():
            parts: list[NDArray[Any]] = [
                np.memmap(path / f"{name}.bin", dtype=np.uint16) for name in ("train", "val")
            ]
            self.vocab_size = 1 + int(max(part.max() for part in parts))
        else:
            characters = np.array(list(path.read_text(encoding="utf-8")))
            vocabulary, ids = np.unique(characters, return_inverse=True)
            self.vocab_size = len(vocabulary)
            parts = [ids[: len(ids) * 9 // 10], ids[len(ids) * 9 // 10 :]]
        self._train, self._validation = (
            np.lib.stride_tricks.sliding_window_view(part, block_size + 1)[::block_size]
            for part in parts
        )
        self.batch_size = batch_size
        self._device = device

    def batches(self, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Return windows and the next tokens, each [batch_size, block_size]: one pass a time."""
        generator = np.random.default_rng(seed)
        while True:
            order = generator.permutation(len(self._train))
            for start in range(0, len(order) - self.batch_size + 1, self.batch_size):
                yield self._pair(self._train[order[start : start + self.batch_size]])

    def validation(self, number: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Return the same windows each time, spread over the validation tokens."""
        chosen = np.linspace(0, len(self._validation) - 1, number).astype(int)
        for start in range(0, number, 32):
            yield self._pair(self._validation[chosen[start : start + 32]])

    def _pair(self, windows: Any) -> tuple[Tensor, Tensor]:
        ids = torch.from_numpy(windows.astype(np.int64)).to(self._device)
        return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def model_of(settings: dict[str, Any], vocab_size: int) -> Any:
    """Build the Llama of the comparisons; the seed determines its initial weights."""
    width = settings["width"]
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=width,
        intermediate_size=-(-8 * width // 3 // 32) * 32,
        num_hidden_layers=settings["layers"],
        num_attention_heads=width // 32,
        max_position_embeddings=settings["block_size"],
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=0,
    )
    return build_model(
        ModelOptions(),
        config,
        weights_from=None,
        seed=settings["seed"],
        device=torch.device(settings["device"]),
        vocab_size=vocab_size,
    )


def text_of(settings: dict[str, Any], batch_size: int | None = None) -> Text:
    """Open the tokens of a training from its settings."""
    size = batch_size or settings["batch_size"]
    return Text(
        Path(settings["text"]),
        batch_size=size,
        block_size=settings["block_size"],
        device=torch.device(settings["device"]),
    )


METHODS: dict[str, dict[str, Any]] = {
    "adamw": {},
    "ekfac": {"kfac": True},
    "ekfac-soap": {"kfac": True, "optimizer": "soap", "nesterov": True},
    "muon": {"optimizer": "muon"},
    "muon-polar-express": {"optimizer": "muon", "muon_coefficients": "polar_express"},
    "normuon": {"optimizer": "normuon"},
    "adamw-hyperball": {"hyperball": True},
    "muon-hyperball": {"optimizer": "muon", "hyperball": True},
    "normuon-hyperball": {"optimizer": "normuon", "hyperball": True},
    "soap-hyperball": {"optimizer": "soap", "hyperball": True},
    "soap": {"optimizer": "soap"},
    "soap-nesterov": {"optimizer": "soap", "nesterov": True},
    "soap-library": {"optimizer": "soap"},
}
"""The options of the trainer by method; soap-library is the SOAP of pytorch_optimizer with them."""


class Stepper:
    """An optimizer, with K-FAC before or around it for some methods."""

    def __init__(self, settings: dict[str, Any], model: Any) -> None:
        self._loss_scale = torch.ones((), device=settings["device"])
        self.optimizer: torch.optim.Optimizer
        chosen = METHODS[settings["method"]]
        intervals: dict[str, Any] = {}
        if "kfac" in chosen:
            names = ("factor_update_steps", "inv_update_steps", "max_dim")
            intervals = {f"kfac_{name}": settings[name] for name in names}
        if chosen.get("optimizer") == "soap":
            intervals["soap_update_steps"] = settings["soap_update_steps"]
        options = GPTConfig(
            learning_rate=settings["learning_rate"],
            embedding_learning_rate=settings.get("embedding_learning_rate"),
            weight_decay=WEIGHT_DECAY,
            betas=tuple(settings["betas"]),
            **chosen,
            **intervals,
        )
        if settings["method"] == "soap-library":
            from pytorch_optimizer import SOAP

            self.optimizer = SOAP(
                parameter_groups(options, model),
                lr=options.learning_rate,
                betas=options.betas,
                precondition_frequency=settings["soap_update_steps"],
            )
            self._made = RunOptimizer(self.optimizer)
        else:
            self._made = choose_factory(options, make_extensions(options), seed=0).make(model, None)
            self.optimizer = self._made.optimizer

    def capture_stats(self, tokens: int) -> contextlib.AbstractContextManager[None]:
        """Return the context for the passes of a step."""
        return self._made.record_passes(
            token_weight=1 / tokens, loss_scale=lambda: self._loss_scale
        )

    def step(self, model: Any, learning_rate: float) -> None:
        """Precondition, clip and update."""
        self._made.before_clip(learning_rate=learning_rate)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate * group.get("rate_factor", 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()


def train(options: dict[str, Any]) -> float:
    """Train; return the validation loss at the end."""
    text = text_of(options)
    model = model_of(options, text.vocab_size)
    training = Training(options, model)
    steps = options["steps"]
    schedule: Callable[[int], float] = make_schedule(
        OptimizerOptions(
            lr_scheduler_type="linear",
            learning_rate=options["learning_rate"],
        ),
        total_steps=steps,
        warmup_steps=steps // 20,
    )
    for step, (inputs, labels) in enumerate(islice(text.batches(options["seed"]), steps)):
        training.step(inputs, labels, learning_rate=schedule(step))
    return training.validation_loss(text)


class Training:
    """A model in training by one method, a step at a time.

    Args:
        options: The settings of the training.
        model: The model.
    """

    def __init__(self, options: dict[str, Any], model: Any) -> None:
        self._model, self._loss = model, LanguageModelLoss(model)
        self._stepper = Stepper(options, model)
        self._device = options["device"]
        self._bf16 = options["mixed_precision"] == "bf16"

    def step(self, inputs: Tensor, labels: Tensor, *, learning_rate: float) -> None:
        """Train on one batch."""
        with self._stepper.capture_stats(inputs.numel()):
            with torch.autocast(self._device, torch.bfloat16, enabled=self._bf16):
                objective, _ = self._loss(inputs, labels)
            (objective / inputs.numel()).backward()
        self._stepper.step(self._model, learning_rate)

    @torch.no_grad()
    def validation_loss(self, text: Text) -> float:
        """Return the nats a token over the same windows each time."""
        total, tokens = 0.0, 0
        for inputs, labels in text.validation(_VALIDATION_WINDOWS):
            with torch.autocast(self._device, torch.bfloat16, enabled=self._bf16):
                total += float(self._loss(inputs, labels)[1])
            tokens += inputs.numel()
        return total / tokens


def time_steps(options: dict[str, Any]) -> StepTimes:
    """Time every method's steps on the same batches, one after the other.

    The first steps, in which K-FAC updates more often, run on batches of one sample and do not
    count: the figures are those of whole intervals between updates of the inverses.
    """
    text, small = text_of(options), text_of(options, batch_size=1)
    trainings = {
        method: Training(options | {"method": method}, model_of(options, text.vocab_size))
        for method in options["methods"]
    }
    batches, small_batches = text.batches(seed=0), small.batches(seed=0)
    interval = max(options["inv_update_steps"], options["factor_update_steps"])
    first_steps = 1 << (interval - 1).bit_length()
    # The last two are full batches, so that memory and threads are warm.
    for step in range(first_steps):
        batch = next(batches if step >= first_steps - 2 else small_batches)
        for training in trainings.values():
            training.step(*batch, learning_rate=options["learning_rate"])
    step_times: dict[str, list[float]] = {method: [] for method in trainings}
    order = list(trainings)
    for _ in range(-(-options["turns"] // interval) * interval):
        batch = next(batches)
        for method in order:
            start_time = time.perf_counter()
            trainings[method].step(*batch, learning_rate=options["learning_rate"])
            torch.get_device_module(options["device"]).synchronize()
            step_times[method].append(1000 * (time.perf_counter() - start_time))
        # Rotated, since the first method of a round finds the caches of the last one.
        order = [*order[1:], order[0]]
    return step_times


if __name__ == "__main__":
    restart_with_kept_memory()  # as the trainer does
    serve({"train": train, "steps": time_steps})
