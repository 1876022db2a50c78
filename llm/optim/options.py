"""Options of the optimizer and the learning rate."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from llm.config.duration import Duration, Tokens
from llm.config.options import CLASS_CHOICE, names_class, non_default, option, option_group
from llm.errors import ConfigError

_DECAYING_SCHEDULES = (
    "linear",
    "cosine",
    "cosine_with_restarts",
    "polynomial",
    "warmup_stable_decay",
)


@dataclass(frozen=True, kw_only=True)
class OptimizerKind:
    """The combinations that were tried with an optimizer; others are refused.

    Attributes:
        has_betas: It takes `betas` and `eps`.
        sharded: It trains weights that ranks divide.
        replicated: Each of several models can have its own state.
        averaged: The mean of their states is one, for a resume with another number of models.
        averaged_shards: The same where ranks divide each model.
    """

    has_betas: bool = False
    sharded: bool = False
    replicated: bool = False
    averaged: bool = False
    averaged_shards: bool = False


_ELEMENTWISE = OptimizerKind(sharded=True, replicated=True, averaged=True, averaged_shards=True)
ELEMENTWISE_WITH_BETAS = replace(_ELEMENTWISE, has_betas=True)


def optimizer_kinds(cls: type) -> dict[str, OptimizerKind]:
    """Return the optimizers that a class of options has, by name; those with betas come first."""
    kinds: dict[str, OptimizerKind] = {}
    for base in (OptimizerOptions, *cls.__mro__):
        kinds |= vars(base).get("OPTIMIZERS", {})
    return dict(sorted(kinds.items(), key=lambda item: not item[1].has_betas))


@option_group("Optimizer and learning rate", resume="fixed")
class OptimizerOptions:
    """The optimizer and the learning rate of each step."""

    # An extension has a table of its optimizers under the same name.
    OPTIMIZERS: ClassVar[Mapping[str, OptimizerKind]] = {
        "adamw": ELEMENTWISE_WITH_BETAS,
        "sgd": _ELEMENTWISE,
    }

    optimizer: str | None = option(
        None,
        "adamw, the default; accumadamw; muon or normuon for matrices, with AdamW for the rest; "
        "soap; sgd; or package.module:Class, a torch.optim.Optimizer. With ekfac: the optimizer of "
        "uncovered layers (adamw or soap).",
        resume="state",
        choices=optimizer_kinds,
    )
    embedding_learning_rate: float | None = option(
        None,
        "Peak learning rate of embeddings, head and one-dimensional weights; by default "
        "learning_rate.",
        at_least=0,
    )
    momentum: float | None = option(
        None,
        "Momentum of sgd (by default 0.9), muon and normuon (0.95).",
        requires=("optimizer=sgd", "optimizer=muon", "optimizer=normuon"),
        at_least=0,
        below=1,
    )
    learning_rate: float = option(5e-5, "Peak learning rate.", at_least=0)
    min_learning_rate: float = option(0.0, "Learning rate at the end of the decay.", at_least=0)
    lr_scheduler_type: Literal[
        "linear",
        "cosine",
        "cosine_with_restarts",
        "polynomial",
        "constant",
        "constant_with_warmup",
        "warmup_stable_decay",
    ] = option("linear", "Learning-rate schedule.")
    lr_scheduler_kwargs: str | None = option(
        None,
        "Setting of the schedule: num_cycles=3 for cosine (by default 0.5) and "
        "cosine_with_restarts (1), power=2 for polynomial and linear warmup_stable_decay (1).",
    )
    warmup: Duration = option(
        Duration("0 steps"),
        "Warm-up, while the learning rate rises from 0.",
        units={
            "steps": "num_warmup_steps",
            "samples": "num_warmup_samples",
            "tokens": "num_warmup_tokens",
        },
        at_least=0,
    )
    num_constant_steps: int = option(
        0,
        "Final steps at min_learning_rate, after linear or cosine.",
        at_least=0,
    )
    decay: Duration | None = option(
        None,
        "Final decay of warmup_stable_decay; by default a tenth of all steps.",
        units={"steps": "num_decay_steps", "tokens": "num_decay_tokens"},
        requires=("lr_scheduler_type=warmup_stable_decay",),
        at_least=1,
    )
    lr_batch_scaling: Literal["none", "sqrt"] = option(
        "none",
        "Factor of the learning rate if global_batch_size grows: none, or sqrt of the growth.",
        requires=("global_batch_size",),
    )
    cooldown_tokens: Tokens | None = option(
        None,
        "Tokens of a branch, while the learning rate falls to min_learning_rate.",
        requires=("branch_from",),
        at_least=1,
    )
    cooldown_shape: Literal["linear", "sqrt", "cosine"] = option(
        "linear",
        "Shape of a cooldown and of warmup_stable_decay: linear; sqrt, 1 - sqrt(progress); or "
        "cosine.",
        requires=("lr_scheduler_type=warmup_stable_decay", "cooldown_tokens"),
    )
    weight_decay: float = option(
        0.0,
        "Weight decay of matrices; decoupled, except in sgd.",
        at_least=0,
    )
    betas: tuple[float, ...] = option(
        (0.9, 0.999), "Decay rates of AdamW and SOAP.", at_least=0, below=1
    )
    eps: float = option(1e-8, "Epsilon of AdamW and SOAP.", above=0)
    max_grad_norm: float = option(
        1.0, "Clip the gradient's global norm to this; 0 does not clip.", at_least=0
    )

    @property
    def optimizer_kind(self) -> OptimizerKind:
        """The combinations that were tried with `optimizer`; none if no table names it."""
        name = CLASS_CHOICE if names_class(self.optimizer) else self.optimizer or "adamw"
        return optimizer_kinds(type(self)).get(name, OptimizerKind())

    @property
    def step_change_option(self) -> str | None:
        """The option that changes the steps of `optimizer`; None if nothing does."""
        return None

    @property
    def extra_optimizer_option(self) -> str | None:
        """The option that trains weights besides `optimizer`; None if that trains all of them."""
        return None


def find_optimizer_problems(options: OptimizerOptions) -> list[str]:
    """Return a sentence for each problem of the optimizer's options."""
    problems = []
    if len(options.betas) != 2:
        problems.append(f"--betas takes two numbers, not {len(options.betas)}.")
    if options.embedding_learning_rate is not None and not options.learning_rate:
        problems.append(
            f"--embedding_learning_rate {options.embedding_learning_rate:g} follows the schedule "
            "of --learning_rate, which must be above 0."
        )
    if not options.optimizer_kind.has_betas:
        optimizer_list = _list_optimizers_with_betas(options)
        problems += [
            f"--{name} is not for --optimizer {options.optimizer}, but for {optimizer_list}; leave "
            "it out."
            for name in ("betas", "eps")
            if name in non_default(options)
        ]
    return problems


def _list_optimizers_with_betas(options: OptimizerOptions) -> str:
    """Return the names of the optimizers that have betas, as in `adamw, muon and soap`."""
    kinds = optimizer_kinds(type(options))
    *leading_names, last_name = (name for name, kind in kinds.items() if kind.has_betas)
    return f"{', '.join(leading_names)} and {last_name}" if leading_names else last_name


def find_schedule_problems(options: OptimizerOptions) -> list[str]:
    """Return a sentence for each problem of the learning rate's options."""
    problems = []
    kind = options.lr_scheduler_type
    if options.min_learning_rate > options.learning_rate:
        problems.append(
            f"--min_learning_rate {options.min_learning_rate:g} is above --learning_rate "
            f"{options.learning_rate:g}."
        )
    has_decay = kind in _DECAYING_SCHEDULES or options.cooldown_tokens is not None
    if options.min_learning_rate and not has_decay:
        problems.append(f"--lr_scheduler_type {kind} never decays to --min_learning_rate.")
    if options.num_constant_steps and kind not in ("linear", "cosine"):
        problems.append("--num_constant_steps goes with the linear and cosine schedules only.")
    if options.warmup.value and kind not in (*_DECAYING_SCHEDULES, "constant_with_warmup"):
        problems.append(
            f"--warmup {options.warmup} does not go with --lr_scheduler_type {kind}, which has "
            "none; choose constant_with_warmup."
        )
    try:
        settings = parse_scheduler_kwargs(options.lr_scheduler_kwargs, kind=kind)
    except ConfigError as error:
        return [*problems, str(error)]
    if "power" in settings and options.cooldown_shape != "linear":
        problems.append(
            f"--lr_scheduler_kwargs {options.lr_scheduler_kwargs} is for a linear decay, not for "
            f"--cooldown_shape {options.cooldown_shape}; leave one of them out."
        )
    return problems


def embedding_rate_factor(options: OptimizerOptions) -> float | None:
    """Return `embedding_learning_rate` as a multiple of the schedule's rate, or None."""
    rate = options.embedding_learning_rate
    return None if rate is None else rate / options.learning_rate


_SETTING_BY_SCHEDULER_TYPE = {
    "cosine": "num_cycles",
    "cosine_with_restarts": "num_cycles",
    "polynomial": "power",
    "warmup_stable_decay": "power",
}
"""The only setting of a schedule, by `lr_scheduler_type`."""


def parse_scheduler_kwargs(text: str | None, *, kind: str) -> dict[str, float]:
    """Return the settings of a schedule.

    Args:
        text: The value of `lr_scheduler_kwargs`.
        kind: The value of `lr_scheduler_type`.

    Raises:
        ConfigError: The text cannot be read, or the schedule does not have the setting.
    """
    if text is None:
        return {}
    settings = _split_scheduler_kwargs(text)
    allowed_name = _SETTING_BY_SCHEDULER_TYPE.get(kind)
    for name, value in settings.items():
        if name != allowed_name:
            raise ConfigError(
                f"--lr_scheduler_kwargs sets {name}, which --lr_scheduler_type {kind} does not "
                f"have; " + (f"it has {allowed_name}." if allowed_name else "leave it out.")
            )
        if type(value) not in (int, float) or not 0 < value <= 1e6:
            raise ConfigError(
                f"--lr_scheduler_kwargs {name} must be a number above 0 and at most 1e6, not "
                f"{value!r}."
            )
    return settings


def _split_scheduler_kwargs(text: str) -> dict[str, Any]:
    """Return the settings in a text such as `num_cycles=3` or `{"num_cycles": 3}`.

    Raises:
        ConfigError: The text has another form, or sets a name twice.
    """
    try:
        if text.lstrip().startswith("{"):
            json_settings: dict[str, Any] = json.loads(text)
            return json_settings
        pairs = [pair.partition("=")[::2] for pair in text.split(",")]
        settings = {name.strip(): json.loads(value) for name, value in pairs}
    except ValueError:
        raise ConfigError(
            f"--lr_scheduler_kwargs expects num_cycles=3 or '{{\"num_cycles\": 3}}', not {text!r}."
        ) from None
    if len(settings) < len(pairs):
        raise ConfigError(f"--lr_scheduler_kwargs {text} sets a name twice; give it once.")
    return settings
