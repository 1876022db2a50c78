"""The members of a ladder: models of several sizes, trained by the rule of one preset.

Shapes come from `llm/models/shapes.py`, and lengths, batches and rates from the rule of
`--preset compute_optimal`. Several lengths of one size share a trunk, a run with a constant rate:
each of them is a branch with a cooldown, as long as a fifth of its tokens (Haegele et al. 2024,
arXiv:2405.18392). A branch needs the batch and the rate of its trunk, so the rule then takes the
geometric mean of the lengths.
"""

import functools
import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

from llm.config.command_line import parse_options
from llm.config.duration import Duration, Tokens
from llm.config.options import format_default
from llm.errors import ConfigError
from llm.models.options import SHAPE_OPTIONS
from llm.models.shapes import (
    SIZE_TOLERANCE,
    ParameterCount,
    count_parameters,
    fit_shape,
    read_shape,
)
from llm.optim.compute_optimal import warmup_tokens
from llm.tools.sweep.members import Base, Member, member_name, option_arguments
from llm.trainers.gpt.compute_optimal_preset import (
    COMPUTE_OPTIMAL,
    compute_optimal_values,
    read_budget,
    read_model_fields,
)
from llm.trainers.gpt.main import parse_args

_COOLDOWN_FRACTION = Fraction(1, 5)
"""Part of a length during the cooldown."""

_MAX_TRUNK_CHECKPOINTS = 100

_MODEL_NAMES = ("model_type", "model_name_or_path", "config_name")
"""Options that name a model; without them it is a GPT-2."""

_LADDER_OPTIONS = (*SHAPE_OPTIONS, "max_duration", "preset", "branch_from", "init_from")
"""Options that a ladder sets, or that it has not been tried with."""

_TRUNK_OPTIONS = ("lr_scheduler_type", "keep_every", "cooldown_tokens")
"""Options that a ladder of several lengths also sets."""


class Rung(NamedTuple):
    """A member of a ladder, and the size of its training.

    Attributes:
        member: The member.
        parameters: Parameters of its model.
        shape: Layers, width and heads of its model.
        remark: A sentence if `--model_size` of the same name has another shape; empty otherwise.
        num_tokens: Tokens of its training, with the tokens before its branch.
        num_parent_tokens: Tokens that its parent trains for it.
        batch_tokens: Tokens of a step.
        peak_rate: Peak learning rate.
    """

    member: Member
    parameters: ParameterCount
    shape: tuple[int, int, int]
    remark: str
    num_tokens: int
    num_parent_tokens: int
    batch_tokens: int
    peak_rate: float

    @property
    def flops(self) -> float:
        """The floating-point operations of this member, 6 N D with all parameters."""
        return 6.0 * self.parameters.total * (self.num_tokens - self.num_parent_tokens)


def ladder_rungs(
    base: Base, sizes: Sequence[str], ratios: Sequence[float], grid_options: Mapping[str, str]
) -> list[Rung]:
    """Return the members for each size and length; a trunk precedes its branches.

    Args:
        base: Arguments and folder that the members share.
        sizes: Numbers of parameters, such as 60M.
        ratios: Lengths in tokens per parameter.
        grid_options: Options of a member of the grid, as you would type their values.

    Raises:
        ConfigError: The base sets an option of the ladder, a size or a ratio is repeated or cannot
            be, or the rule does not apply to the base.
    """
    user_arguments = [*base.arguments, *option_arguments(grid_options)]
    user_options = _read_user_options(user_arguments)
    set_options = (*_LADDER_OPTIONS, *(_TRUNK_OPTIONS if len(ratios) > 1 else ()))
    for name in set_options:
        if user_options.get(name) is not None:
            raise ConfigError(f"--ladder sets --{name}, or does not go with it; leave it out.")
    num_tokens = _count_tokens(user_options)
    for option, values in (("ladder", sizes), ("tokens_per_parameter", ratios)):
        if len({*values}) < len(values):
            raise ConfigError(f"--{option} has a value twice; give each value once.")
    rungs: list[Rung] = []
    for size in sizes:
        try:
            model = _describe_model(user_options, num_tokens)
            shape = {**model, **_fit_size(size, {**user_options, **model})}
            rung_base = _RungBase(base, size, user_arguments, user_options, grid_options, shape)
            if len(ratios) == 1:
                rungs.append(_single_rung(rung_base, ratios[0]))
            else:
                rungs += _trunk_and_branches(rung_base, sorted(ratios))
        except ConfigError as error:
            raise ConfigError(f"--ladder {size}: {error}") from error
    return rungs


class _RungBase(NamedTuple):
    """Options that the members of one size share.

    Attributes:
        base: Arguments and folder that all members share.
        size: The name of the size.
        user_arguments: The user's arguments of the trainer.
        user_options: The user's options, by name.
        grid_options: Options of a member of the grid.
        shape: Options of the model.
    """

    base: Base
    size: str
    user_arguments: Sequence[str]
    user_options: Mapping[str, Any]
    grid_options: Mapping[str, str]
    shape: Mapping[str, Any]

    def name(self, ratio: float | None) -> str:
        """Return the name of a member; a trunk has no ratio."""
        length = {} if ratio is None else {"tokens_per_parameter": f"{ratio:g}"}
        return member_name({"model_size": self.size, **length, **self.grid_options})

    @property
    def model_shape(self) -> tuple[int, int, int]:
        """The layers, the width and the heads of the model."""
        return read_shape(read_model_fields({**self.user_options, **self.shape}))

    def compare_shape(self) -> str:
        """Return a sentence if `--model_size` of the same name is another shape, otherwise ""."""
        try:
            fields = read_model_fields({**self.user_options, "model_size": self.size})
        except ConfigError:  # no shape has this size without the tokens of the tokenizer
            return ""
        num_layers, width, num_heads = read_shape(fields)
        if (num_layers, width, num_heads) == self.model_shape:
            return ""
        return (
            f"--model_size {self.size} alone has {num_layers} layers of width {width} with "
            f"{num_heads} heads, {count_parameters(fields).total:,} parameters: the ladder fits "
            "the number of parameters, and counts the tokens of the tokenizer."
        )

    def optimal_options(self, length: Duration) -> dict[str, Any]:
        """Return the user's options, the shape and the values of the rule for a length.

        Raises:
            ConfigError: The rule does not apply, or the trainer refuses the options.
        """
        shape_and_length = {**self.shape, "max_duration": length}
        preset = {**shape_and_length, "preset": COMPUTE_OPTIMAL}
        parse_args([*self.user_arguments, *option_arguments(_as_typed(preset))])
        values = {**self.user_options, **shape_and_length}
        return compute_optimal_values(values) | values

    def member_options(self, options: Mapping[str, Any]) -> dict[str, str]:
        """Return the options that the user has not set, and the grid's options, as typed."""
        ladder_options = {
            name: value for name, value in options.items() if name not in self.user_options
        }
        return {**_as_typed(ladder_options), **self.grid_options}


def _as_typed(options: Mapping[str, Any]) -> dict[str, str]:
    """Return options with their values as you would type them."""
    return {
        name: "none" if value is None else format_default(value) for name, value in options.items()
    }


def _read_user_options(arguments: Sequence[str]) -> dict[str, Any]:
    """Return the options that arguments of the trainer set, also in a TOML file, by name."""
    from llm.trainers.gpt.extensions import GPTConfig

    user_options: dict[str, Any] = {}

    def record(values: dict[str, Any]) -> dict[str, Any]:
        user_options.update(values)
        return {}

    parse_options(GPTConfig, arguments, prog="llm-trainers train", description="", inherit=record)
    return user_options


def _count_tokens(user_options: Mapping[str, Any]) -> int:
    """Return the number of tokens of the tokenizer; the trainer enlarges a smaller embedding.

    Raises:
        ConfigError: The tokenizer cannot be read.
        DataError: No option names it, and the first token file does not exist.
    """
    from llm.trainers.gpt.data_tokenizer import use_tokenizer_of_data
    from llm.trainers.gpt.extensions import GPTConfig
    from llm.trainers.gpt.load_trained_model import load_run_tokenizer

    config = use_tokenizer_of_data(GPTConfig(**user_options))
    return len(load_run_tokenizer(config))


def _describe_model(user_options: Mapping[str, Any], num_tokens: int) -> dict[str, Any]:
    """Return the options that name a GPT-2 if nothing is named, and enlarge a small vocabulary."""
    is_named = any(user_options.get(name) for name in _MODEL_NAMES)
    model: dict[str, Any] = {} if is_named else {"model_type": "gpt2"}
    overrides = user_options.get("config_overrides")
    if read_model_fields({**user_options, **model})["vocab_size"] < num_tokens:
        vocabulary = f"vocab_size={num_tokens}"
        model["config_overrides"] = ",".join(filter(None, (overrides, vocabulary)))
    return model


def _fit_size(size: str, model: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that give a model a number of parameters, such as 60M."""
    try:
        num_parameters = Tokens(size)
    except ValueError:
        raise ConfigError("a size is a number of parameters such as 60M or 1.3B.") from None
    num_layers, hidden_size, num_heads = fit_shape(size, read_model_fields(model))
    shape = {"num_layers": num_layers, "hidden_size": hidden_size, "num_attention_heads": num_heads}
    total = count_parameters(read_model_fields({**model, **shape})).total
    if abs(total / num_parameters - 1) > SIZE_TOLERANCE:
        raise ConfigError(
            f"--config_overrides {model.get('config_overrides')} sets layers, width or heads, "
            "which the ladder chooses; leave them out."
        )
    return shape


def _single_rung(rung_base: _RungBase, ratio: float) -> Rung:
    """Return the only member of a size."""
    options = rung_base.optimal_options(Duration(f"{ratio:.12g} tokens per parameter"))
    budget = read_budget(options)
    return Rung(
        member=Member(name=rung_base.name(ratio), options=rung_base.member_options(options)),
        parameters=budget.parameters,
        shape=rung_base.model_shape,
        remark=rung_base.compare_shape(),
        num_tokens=budget.num_tokens,
        num_parent_tokens=0,
        batch_tokens=options["global_batch_size"] * budget.block_size,
        peak_rate=options["learning_rate"],
    )


def _trunk_and_branches(rung_base: _RungBase, ratios: Sequence[float]) -> list[Rung]:
    """Return a trunk with a constant rate, and a branch with a cooldown for each ratio."""
    num_parameters = count_parameters(
        read_model_fields({**rung_base.user_options, **rung_base.shape})
    ).total
    lengths = [math.ceil(ratio * num_parameters) for ratio in ratios]
    mean_length = round(math.exp(sum(map(math.log, lengths)) / len(lengths)))
    options = rung_base.optimal_options(Duration(f"{mean_length} tokens"))
    budget = read_budget(options)
    batch_tokens = options["global_batch_size"] * budget.block_size
    steps = _branch_steps(ratios, lengths[0], batch_tokens)
    options["lr_scheduler_type"] = "constant_with_warmup"
    if "warmup" not in rung_base.user_options:
        options["warmup"] = Duration(f"{warmup_tokens(lengths[0])} tokens")

    make_rung = functools.partial(
        Rung,
        parameters=budget.parameters,
        shape=rung_base.model_shape,
        remark=rung_base.compare_shape(),
        batch_tokens=batch_tokens,
        peak_rate=options["learning_rate"],
    )
    trunk = _make_trunk(rung_base, options, steps)
    rungs = [make_rung(member=trunk, num_tokens=steps[-1] * batch_tokens, num_parent_tokens=0)]
    for ratio, length, step in zip(ratios, lengths, steps, strict=True):
        num_trunk_tokens = step * batch_tokens
        branch_options = {
            **{name: value for name, value in options.items() if name != "max_duration"},
            "branch_from": str(rung_base.base.folder / trunk.name / str(step)),
            "cooldown_tokens": length - num_trunk_tokens,
            "cooldown_shape": "sqrt",
            "keep_every": None,
        }
        branch = Member(
            name=rung_base.name(ratio),
            options=rung_base.member_options(branch_options),
            parent=trunk.name,
        )
        rungs.append(
            make_rung(member=branch, num_tokens=length, num_parent_tokens=num_trunk_tokens)
        )
    return rungs


def _branch_steps(ratios: Sequence[float], shortest_length: int, batch_tokens: int) -> list[int]:
    """Return the steps of a trunk where its branches start, all multiples of one number.

    Args:
        ratios: The lengths in tokens per parameter, the shortest first.
        shortest_length: The shortest length in tokens.
        batch_tokens: Tokens of a step.
    """
    multiples = _common_multiples(ratios)
    unit_tokens = shortest_length / multiples[0] * (1 - _COOLDOWN_FRACTION)
    unit_steps = math.floor(unit_tokens / batch_tokens)
    shortest_cooldown = shortest_length - multiples[0] * unit_steps * batch_tokens
    is_too_short = unit_steps < 1 or shortest_cooldown < batch_tokens
    if is_too_short or multiples[-1] > _MAX_TRUNK_CHECKPOINTS:
        raise ConfigError(
            f"--tokens_per_parameter {' '.join(f'{ratio:g}' for ratio in ratios)} cannot be "
            f"branches of one run, which would need {multiples[-1]} checkpoints, one every "
            f"{unit_tokens / batch_tokens:.2g} steps; choose multiples of one number, or longer "
            "lengths."
        )
    return [multiple * unit_steps for multiple in multiples]


def _make_trunk(
    rung_base: _RungBase, options: Mapping[str, Any], branch_steps: Sequence[int]
) -> Member:
    """Return a run that ends at the last of some steps, and keeps a checkpoint at each of them."""
    keep_every = math.gcd(*branch_steps)
    trunk_options = {
        **options,
        "max_duration": Duration(f"{branch_steps[-1]} steps"),
        "keep_every": keep_every,
        "keep_checkpoints": 2,
    }
    if not {"save_interval", "checkpointing_minutes"} & rung_base.user_options.keys():
        trunk_options["save_interval"] = Duration(f"{keep_every} steps")
    return Member(name=rung_base.name(None), options=rung_base.member_options(trunk_options))


def _common_multiples(ratios: Sequence[float]) -> list[int]:
    """Return ratios as multiples of their greatest common divisor: 1, 2, 4 for 10, 20, 40."""
    fractions = [Fraction(str(ratio)) for ratio in ratios]
    denominator = math.lcm(*(fraction.denominator for fraction in fractions))
    numerators = [int(fraction * denominator) for fraction in fractions]
    divisor = math.gcd(*numerators)
    return [numerator // divisor for numerator in numerators]


def ladder_lines(rungs: Sequence[Rung]) -> list[str]:
    """Return a table of the members' sizes, shapes, lengths, batches, rates and FLOPs.

    Below it are the sum of the FLOPs, and the remarks.
    """
    shape_heading = ("parameters", "layers, width, heads")
    heading = ("member", *shape_heading, "tokens", "batch", "learning rate", "FLOPs (6 N D)")
    rows = [
        (
            rung.member.name,
            f"{rung.parameters.total:,}",
            ", ".join(map(str, rung.shape)),
            f"{rung.num_tokens:,}",
            f"{rung.batch_tokens:,}",
            f"{rung.peak_rate:g}",
            f"{rung.flops:.3g}",
        )
        for rung in rungs
    ]
    widths = [max(map(len, column)) for column in zip(heading, *rows, strict=True)]
    lines = [
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])])
        for row in (heading, *rows)
    ]
    num_flops = sum(rung.flops for rung in rungs)
    lines.append(f"The ladder takes {num_flops:.3g} FLOPs.")
    branches = [rung for rung in rungs if rung.member.parent is not None]
    if branches:
        separate_flops = sum(6.0 * rung.parameters.total * rung.num_tokens for rung in branches)
        lines[-1] = (
            f"The ladder takes {num_flops:.3g} FLOPs, and separate runs of these lengths "
            f"{separate_flops:.3g}: the members of a size are branches of one run."
        )
    return [*lines, *dict.fromkeys(rung.remark for rung in rungs if rung.remark)]
