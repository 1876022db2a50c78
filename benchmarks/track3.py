"""Steps to a validation loss of 3.28 by the rules of modded-nanogpt's track 3, in parts on one GPU.

python -m benchmarks.track3 --data FOLDER --run runs/track3 --minutes 13

The rules (github.com/KellerJordan/modded-nanogpt, records/track_3_optimization): the architecture,
the tokens, their order and the batch of 524,288 tokens are fixed, a step has one forward and one
backward pass, and only optimizer, schedule and initial values are free. A result counts if the mean
loss of n runs with the same length is below 3.28 by at least 0.004 / sqrt(n).

The same command continues after it has stopped, from the state at which it stopped.
"""

import json
import math
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from benchmarks.measure import say
from benchmarks.report import ReportOptions, Section, machine, render, run_benchmark, table
from llm.config.options import option
from llm.errors import ConfigError, DataError
from llm.optim.groups import split_groups
from llm.optim.run_optimizer import RunOptimizer
from llm.trainers.gpt.extensions import GPTConfig
from llm.trainers.gpt.seams import choose_factory, make_extensions

TARGET_LOSS = 3.28
MIN_MARGIN = 0.004
"""Of one run; of n runs it is divided by the root of n."""

Method = Literal["adamw", "muon", "adamw-hyperball", "muon-hyperball", "normuon-hyperball"]


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """An optimizer with the settings that the track's history lists for it.

    Muon and NorMuon orthogonalize as in the trainer, by five steps. The track takes twelve steps of
    another iteration, which come closer to an orthogonal matrix.

    Attributes:
        steps: Length of a run.
        optimizer: Options of the trainer.
        matrix_rate: Peak rate of the matrices inside the blocks. Muon's steps are 0.2 times the
            root of the longer side here, so its rates differ from those of the track.
        rates: Peak rates of embedding, output head, and vectors.
        matrix_cooldown: Share of the run in which the matrices' rate falls to zero.
        cooldown: The same for all others.
        warmup_steps: Steps in which all rates rise.
    """

    steps: int
    optimizer: dict[str, Any]
    matrix_rate: float
    rates: tuple[float, float, float]
    matrix_cooldown: float
    cooldown: float
    warmup_steps: int = 0


_AUXILIARY = {"betas": (0.8, 0.95), "eps": 1e-10}
RECIPES: dict[str, Recipe] = {
    # Result 2.
    "adamw": Recipe(
        steps=5625,
        optimizer={"betas": (0.9, 0.95), "eps": 1e-10},
        matrix_rate=0.0015,
        rates=(0.3, 1 / 320, 0.01),
        matrix_cooldown=0.7,
        cooldown=0.7,
        warmup_steps=250,
    ),
    # Result 36; the step of the matrices to the residual stream from the MLPs is twice as long.
    "muon": Recipe(
        steps=3250,
        optimizer={"optimizer": "muon", "weight_decay": 0.28, **_AUXILIARY},
        matrix_rate=0.0045,
        rates=(0.7, 0.004, 0.015),
        matrix_cooldown=0.7,
        cooldown=0.7,
    ),
    # Result 4.
    "adamw-hyperball": Recipe(
        steps=4875,
        optimizer={"hyperball": True, "betas": (0.9, 0.95), "eps": 1e-10},
        matrix_rate=0.018,
        rates=(0.3, 1 / 320, 0.01),
        matrix_cooldown=1.0,
        cooldown=0.4,
        warmup_steps=250,
    ),
    # Result 37.
    "muon-hyperball": Recipe(
        steps=3250,
        optimizer={"optimizer": "muon", "hyperball": True, **_AUXILIARY},
        matrix_rate=0.018,
        rates=(0.91, 0.0064, 0.0195),
        matrix_cooldown=1.0,
        cooldown=0.85,
    ),
    # Result 8.
    "normuon-hyperball": Recipe(
        steps=3250,
        optimizer={"optimizer": "normuon", "hyperball": True, **_AUXILIARY},
        matrix_rate=0.018,
        rates=(0.3, 1 / 320, 0.01),
        matrix_cooldown=1.0,
        cooldown=0.4,
    ),
}


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The track's architecture, batch and validation data.

    Attributes:
        layers: Blocks.
        width: Width of the residual stream.
        head_width: Width of an attention head.
        vocab_size: Rows of the embedding.
        block_size: Tokens of a sample.
        batch_tokens: Tokens of a step.
        val_tokens: Tokens of an evaluation, from the beginning of the validation file.
    """

    layers: int = 12
    width: int = 768
    head_width: int = 128
    vocab_size: int = 50304
    block_size: int = 1024
    batch_tokens: int = 524_288
    val_tokens: int = 10_485_760


TOY = Shape(
    layers=2,
    width=16,
    head_width=8,
    vocab_size=64,
    block_size=16,
    batch_tokens=128,
    val_tokens=256,
)


@dataclass(frozen=True, kw_only=True)
class Track3Options(ReportOptions):
    """Options of the benchmark."""

    data: str | None = option(
        None,
        "Folder of fineweb_train_*.bin and fineweb_val_*.bin, as modded-nanogpt's "
        "data/cached_fineweb10B.py downloads them.",
        group="Run",
    )
    run: str = option("runs/track3", "Folder of the states and the losses.", group="Run")
    method: Method = option("muon-hyperball", "Optimizer, with published settings.", group="Run")
    steps: int | None = option(
        None, "Length of a run; by default that of the published result.", group="Run", at_least=1
    )
    seeds: int = option(1, "Runs, one after the other.", group="Run", at_least=1)
    minutes: float | None = option(
        None, "Stop after this time; the same command continues.", group="Run", above=0
    )
    save_minutes: float = option(5.0, "Time between two saves.", group="Run", above=0)
    micro_batch_size: int = option(64, "Samples of a pass.", group="Run", at_least=1)
    device: Literal["cuda", "cpu"] = option("cuda", "Where the model trains.", group="Run")
    no_compile: bool = option(False, "Run the model without torch.compile.", group="Run")
    toy: bool = option(
        False, "A tiny model and batch, which test the program on a CPU.", group="Run"
    )


_HEADER_BYTES = 1024


class Tokens:
    """The batches of the track, in the order of its files.

    A file has a header of 256 int32 values and then tokens as uint16. A batch that does not fit
    into the rest of a file begins in the next one.

    Args:
        folder: The folder of the files.
        shape: The batch.
    """

    def __init__(self, folder: Path, shape: Shape) -> None:
        self._shape = shape
        self._files = [_map_tokens(path) for path in sorted(folder.glob("fineweb_train_*.bin"))]
        val_files = sorted(folder.glob("fineweb_val_*.bin"))
        if not self._files or not val_files:
            raise DataError(
                f"--data {folder} has no fineweb_train_*.bin or no fineweb_val_*.bin; download "
                "them by modded-nanogpt's data/cached_fineweb10B.py."
            )
        self._validation = _map_tokens(val_files[0])
        if len(self._validation) <= shape.val_tokens:
            raise DataError(f"{val_files[0]} has fewer tokens than an evaluation takes.")

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """Return inputs and labels of a step, each [samples, block_size].

        Raises:
            DataError: The files have no tokens left.
        """
        size, index = self._shape.batch_tokens, step
        for tokens in self._files:
            num_batches = max(0, math.ceil((len(tokens) - size - 1) / size))
            if index < num_batches:
                return self._pair(tokens[index * size : (index + 1) * size + 1])
            index -= num_batches
        raise DataError(f"The files have tokens for {step} steps only; download more of them.")

    def validation(self) -> tuple[Tensor, Tensor]:
        """Return inputs and labels of an evaluation, each [samples, block_size]."""
        return self._pair(self._validation[: self._shape.val_tokens + 1])

    def _pair(self, tokens: NDArray[np.uint16]) -> tuple[Tensor, Tensor]:
        ids = torch.from_numpy(tokens.astype(np.int64))
        block_size = self._shape.block_size
        return ids[:-1].view(-1, block_size), ids[1:].view(-1, block_size)


def _map_tokens(path: Path) -> NDArray[np.uint16]:
    header = np.fromfile(path, dtype=np.int32, count=3)
    if header[:2].tolist() != [20240520, 1]:
        raise DataError(f"{path} does not begin as a token file of modded-nanogpt does.")
    num_tokens = int(header[2]) if len(header) > 2 else 0
    if not 0 < num_tokens <= (path.stat().st_size - _HEADER_BYTES) // 2:
        raise DataError(f"{path} has fewer tokens than its header says; download it again.")
    return np.memmap(path, dtype=np.uint16, mode="r", offset=_HEADER_BYTES, shape=(num_tokens,))


class _Norm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.gains = nn.Parameter(torch.ones(width))

    def forward(self, hidden: Tensor) -> Tensor:
        return F.rms_norm(hidden, (hidden.shape[-1],), self.gains.to(hidden.dtype))


class _Linear(nn.Linear):
    def forward(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.weight.to(hidden.dtype), self.bias.to(hidden.dtype))


class _Attention(nn.Module):
    """Causal attention with normalized queries and keys; half of each head is not rotated."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self._head_width = shape.head_width
        self.q, self.k, self.v, self.proj = (_Linear(shape.width, shape.width) for _ in range(4))
        quarter = shape.head_width // 4
        frequencies = torch.zeros(2 * quarter)
        frequencies[:quarter] = 1024.0 ** -torch.linspace(0, 1, quarter)
        self.angles: Tensor
        self.register_buffer("angles", torch.arange(shape.block_size)[:, None] * frequencies)

    def forward(self, hidden: Tensor) -> Tensor:
        queries, keys, values = (
            layer(hidden).unflatten(-1, (-1, self._head_width)).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        queries, keys = (self._rotate(F.rms_norm(x, (x.shape[-1],))) for x in (queries, keys))
        heads = F.scaled_dot_product_attention(queries, keys, values, scale=0.12, is_causal=True)
        output: Tensor = self.proj(heads.transpose(1, 2).flatten(2))
        return output

    def _rotate(self, heads: Tensor) -> Tensor:
        first, second = heads.float().chunk(2, dim=-1)
        cos, sin = self.angles.cos(), self.angles.sin()
        rotated = torch.cat([first * cos + second * sin, second * cos - first * sin], dim=-1)
        return rotated.to(heads.dtype)


class _Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.norm1, self.norm2 = _Norm(shape.width), _Norm(shape.width)
        self.attn = _Attention(shape)
        self.mlp = nn.ModuleDict(
            {
                "fc": _Linear(shape.width, 4 * shape.width),
                "proj": _Linear(4 * shape.width, shape.width),
            }
        )

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.attn(self.norm1(hidden))
        activations = self.mlp["fc"](self.norm2(hidden)).relu().square()
        output: Tensor = hidden + self.mlp["proj"](activations)
        return output


class Track3Model(nn.Module):
    """The track's model; its activations and its embedding are in bf16.

    Args:
        shape: The sizes.
        seed: Of the initial weights.
        is_on_spheres: Whether initial weights are those of the track's results with Hyperball,
            where none is zero.
    """

    def __init__(self, shape: Shape, *, seed: int, is_on_spheres: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(shape.vocab_size, shape.width)
        self.blocks = nn.ModuleList([_Block(shape) for _ in range(shape.layers)])
        self.proj = _Linear(shape.width, shape.vocab_size)
        self.norm1, self.norm2 = _Norm(shape.width), _Norm(shape.width)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                _initialize(name, parameter, generator, is_on_spheres=is_on_spheres)
        self.embed.bfloat16()

    def get_output_embeddings(self) -> nn.Module:
        """Return the output head, which Muon and Hyperball leave out."""
        return self.proj

    def forward(self, inputs: Tensor, labels: Tensor) -> Tensor:
        """Return the sum of the losses of all tokens."""
        hidden = self.norm1(self.embed(inputs))
        for block in self.blocks:
            hidden = block(hidden)
        logits = self.proj(self.norm2(hidden)).float()
        logits = 15 * logits * (logits.square() + 15**2).rsqrt()
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


def _initialize(
    name: str, parameter: Tensor, generator: torch.Generator, *, is_on_spheres: bool
) -> None:
    if parameter.ndim == 1:
        parameter.fill_(1.0 if name.endswith("gains") else 0.0)
    elif name.startswith("embed"):
        parameter.normal_(generator=generator)
    elif "proj" in name and not is_on_spheres:
        parameter.zero_()
    else:
        parameter.normal_(std=(3 * parameter.shape[1]) ** -0.5, generator=generator)
        if is_on_spheres:
            factors = {".attn.proj.": 1.25, ".mlp.proj.": 3.0, ".mlp.fc.": 1.5}
            parameter.mul_(next((f for part, f in factors.items() if part in name), 1.0))


def make_optimizer(recipe: Recipe, model: Track3Model) -> RunOptimizer:
    """Make the optimizer, with a peak rate and the share of the cooldown in each group."""
    config = GPTConfig(learning_rate=recipe.matrix_rate, **recipe.optimizer)
    run_optimizer = choose_factory(config, make_extensions(config), seed=0).make(model, None)
    rates: dict[Tensor, float] = {p: recipe.rates[2] for p in model.parameters() if p.ndim == 1}
    rates |= {model.embed.weight: recipe.rates[0], model.proj.weight: recipe.rates[1]}
    groups = split_groups(
        run_optimizer.optimizer.param_groups,
        {p for p in model.parameters() if p in rates},
        chosen_settings={"cooldown": recipe.cooldown},
        other_settings={"peak": recipe.matrix_rate, "cooldown": recipe.matrix_cooldown},
    )
    for rate in dict.fromkeys(rates.values()):
        chosen = {p for p in model.parameters() if rates.get(p) == rate}
        groups = split_groups(groups, chosen, chosen_settings={"peak": rate}, other_settings={})
    run_optimizer.optimizer.param_groups = groups
    return run_optimizer


def rate_at(group: dict[str, Any], step: int, *, steps: int, warmup_steps: int) -> float:
    """Return the learning rate of a group: constant, then falling to zero on a straight line."""
    rise = min(1.0, (step + 1) / warmup_steps) if warmup_steps else 1.0
    rate: float = group["peak"] * rise * min(1.0, (1 - step / steps) / group["cooldown"])
    return rate


@dataclass
class Track3Run:
    """A run of one seed, in its folder.

    Attributes:
        options: The options.
        seed: Of the initial weights.
        folder: Where its state and its losses are.
        losses: Validation loss by step.
    """

    options: Track3Options
    seed: int
    folder: Path
    losses: dict[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        options = self.options
        self._shape = TOY if options.toy else Shape()
        self._recipe = RECIPES[options.method]
        self._steps = options.steps or self._recipe.steps
        is_on_spheres = bool(self._recipe.optimizer.get("hyperball"))
        self._model = Track3Model(self._shape, seed=self.seed, is_on_spheres=is_on_spheres).to(
            options.device
        )
        self._forward: Any = self._model
        if options.device == "cuda" and not options.no_compile:
            self._forward = torch.compile(self._model, dynamic=False)
        self._run_optimizer = make_optimizer(self._recipe, self._model)
        self._step = 0
        self.folder.mkdir(parents=True, exist_ok=True)
        self._load()

    def train(self, tokens: Tokens, *, deadline: float) -> bool:
        """Train up to the end or the deadline; return whether the run has ended.

        Args:
            tokens: The batches.
            deadline: On the clock of `time.monotonic`.
        """
        last_save = time.monotonic()
        while True:
            interval = 125 if self._step < 0.9 * self._steps else 25
            is_last = self._step == self._steps
            if (self._step % interval == 0 or is_last) and self._step not in self.losses:
                self.losses[self._step] = self._validation_loss(tokens)
                say(f"seed {self.seed}, step {self._step}: {self.losses[self._step]:.5f}")
            if is_last or time.monotonic() > deadline:
                self._save()
                return is_last
            if time.monotonic() - last_save > 60 * self.options.save_minutes:
                self._save()
                last_save = time.monotonic()
            self._train_step(*tokens.batch(self._step))
            self._step += 1

    def _train_step(self, inputs: Tensor, labels: Tensor) -> None:
        optimizer = self._run_optimizer.optimizer
        for micro_batch in self._micro_batches(inputs, labels):
            self._forward(*micro_batch).backward()
        for group in optimizer.param_groups:
            group["lr"] = rate_at(
                group, self._step, steps=self._steps, warmup_steps=self._recipe.warmup_steps
            )
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    @torch.no_grad()
    def _validation_loss(self, tokens: Tokens) -> float:
        inputs, labels = tokens.validation()
        loss_sums = [float(self._forward(*pair)) for pair in self._micro_batches(inputs, labels)]
        return sum(loss_sums) / inputs.numel()

    def _micro_batches(self, inputs: Tensor, labels: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        size = self.options.micro_batch_size
        for pair in zip(inputs.split(size), labels.split(size), strict=True):
            yield pair[0].to(self.options.device), pair[1].to(self.options.device)

    def _settings(self) -> dict[str, Any]:
        names = ("method", "micro_batch_size", "toy")
        settings = {name: getattr(self.options, name) for name in names}
        settings |= asdict(self._recipe) | {"steps": self._steps}
        plain: dict[str, Any] = json.loads(json.dumps(settings))
        return plain

    def _state(self) -> dict[str, Any]:
        """Return live tensors of the whole state."""
        names: dict[Tensor, str] = {p: name for name, p in self._model.named_parameters()}
        optimizer_state = self._run_optimizer.optimizer.state
        parts = self._run_optimizer.parts()
        return {
            "model": dict(self._model.named_parameters()),
            "optimizer": {names[p]: state for p, state in optimizer_state.items()},
            "parts": {name: part.state_dict() for name, part in parts.items()},
        }

    def _save(self) -> None:
        path, temporary = self.folder / "state.pt", self.folder / "state.pt.new"
        progress = {"step": self._step, "losses": self.losses, "settings": self._settings()}
        torch.save(self._state() | progress, temporary)
        os.replace(temporary, path)

    def _load(self) -> None:
        path = self.folder / "state.pt"
        if not path.exists():
            return
        saved = torch.load(path, map_location="cpu", weights_only=True)
        for name, value in self._settings().items():
            if saved["settings"][name] != value:
                raise ConfigError(
                    f"{path} is from a run with {name} {saved['settings'][name]}, and this one has "
                    f"{value}; name another folder by --run."
                )
        with torch.no_grad():
            _copy(self._state(), saved)
        self._step, self.losses = saved["step"], saved["losses"]


def _copy(target: dict[str, Any], source: dict[str, Any]) -> None:
    """Copy tensors of nested dicts in place."""
    for name, value in target.items():
        if isinstance(value, Tensor):
            value.copy_(source[name])
        else:
            _copy(value, source[name])


def is_significant(losses: Sequence[float]) -> bool:
    """Return whether runs of one length are below the target by the track's rule."""
    mean = sum(losses) / len(losses)
    return (TARGET_LOSS - mean) * math.sqrt(len(losses)) >= MIN_MARGIN


def report(options: Track3Options, _: Path) -> str:
    """Train up to the time limit, and return the losses so far."""
    if options.data is None:
        raise ConfigError("--data is missing; name the folder of the track's token files.")
    if options.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda needs a GPU, and torch sees none; name cpu with --toy.")
    tokens = Tokens(Path(options.data), TOY if options.toy else Shape())
    minutes = math.inf if options.minutes is None else options.minutes
    deadline = time.monotonic() + 60 * minutes
    runs: list[Track3Run] = []
    for seed in range(options.seeds):
        run = Track3Run(options, seed, Path(options.run) / f"{options.method}-seed{seed}")
        runs.append(run)
        if not run.train(tokens, deadline=deadline):
            say("stopped; the same command continues")
            break
        del run._model, run._forward, run._run_optimizer
    return render("Track 3", machine(["torch"]), [_section(options, runs)])


def _section(options: Track3Options, runs: Sequence[Track3Run]) -> Section:
    rows = []
    for step in sorted({step for run in runs for step in run.losses}):
        losses = [run.losses[step] for run in runs if step in run.losses]
        mean = sum(losses) / len(losses)
        is_complete = len(losses) == options.seeds
        below = "yes" if is_complete and is_significant(losses) else "no"
        rows.append([f"{step:,}", str(len(losses)), f"{mean:.4f}", below])
    lines = [
        f"{options.method}, {options.seeds} runs"
        + (", at toy size, which is not the track's." if options.toy else "."),
        "",
        *table(["step", "runs", "mean validation loss", "below 3.28 by the rule"], rows),
    ]
    return Section(title="Validation loss", lines=lines)


if __name__ == "__main__":
    sys.exit(
        run_benchmark("track3", "Steps to 3.28 by the rules of track 3.", Track3Options, report)
    )
