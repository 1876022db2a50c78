"""Reads the notation of blends by `--data_path`, and of `--split`."""

import math
from collections.abc import Sequence
from pathlib import Path

from llm.errors import ConfigError

DEFAULT_SPLIT = "969,30,1"


def parse_blend(
    blend: Sequence[float | str], *, option: str
) -> tuple[list[Path], list[float] | None]:
    """Return the prefixes of token files in a blend, and their weights.

    Args:
        blend: Prefixes alone, or each prefix after its weight. Numbers are weights, strings are
            prefixes.
        option: The option that they were given with, for messages.

    Returns:
        (prefixes, their weights); None instead of weights if no prefix has one.

    Raises:
        ConfigError: Weights and prefixes do not alternate, or a weight cannot be one.
    """
    has_weights = isinstance(blend[0], int | float)
    paths: list[Path] = []
    weights: list[float] = []
    for value_index, value in enumerate(blend):
        fault = _find_blend_fault(value, expects_weight=has_weights and value_index % 2 == 0)
        if fault is not None:
            raise ConfigError(f"{option} {fault}")
        if isinstance(value, str):
            paths.append(Path(value))
        else:
            weights.append(float(value))
    if isinstance(blend[-1], int | float):
        raise ConfigError(f"{option} ends with the weight {blend[-1]:g}; a prefix must follow it.")
    if has_weights and not any(weights):
        raise ConfigError(f"{option} gives every source the weight 0; one must be above it.")
    if not math.isfinite(sum(weights)):
        raise ConfigError(f"{option} has weights with a sum that is not finite; give smaller ones.")
    return paths, weights if has_weights else None


def _find_blend_fault(value: float | str, *, expects_weight: bool) -> str | None:
    """Return the end of a sentence about a value that does not fit into a blend, or None."""
    if isinstance(value, str):
        if not expects_weight:
            return None
        return (
            f"gives {value} without a weight before it; give a weight before each prefix, or none "
            "at all."
        )
    if not expects_weight:
        return (
            f"has the number {value:g} where a prefix belongs; give a weight before each prefix, "
            f"or none at all, and write a file of that name as ./{value:g}."
        )
    if not math.isfinite(value) or value < 0:
        return f"gives the weight {value:g}; weights must be finite and not negative."
    return None


def parse_split(text: str) -> tuple[float, float, float]:
    """Read `training,validation,testing`; numbers missing at the end are 0.

    Returns:
        The three fractions, with the sum 1.

    Raises:
        ConfigError: The text is not made of such numbers.
    """
    try:
        shares = [float(number_text) for number_text in text.split(",")]
    except ValueError:
        shares = []
    are_valid = all(share >= 0 for share in shares) and math.isfinite(sum(shares))
    has_valid_length = 1 <= len(shares) <= 3
    if not has_valid_length or not are_valid or sum(shares) == 0:
        raise ConfigError(
            f"--split {text} is not a split; give up to three numbers for training, validation "
            "and testing, none negative and not all 0, such as 980,10,10."
        )
    training, validation, test = [*shares, 0.0, 0.0][:3]
    share_sum = sum(shares)
    return training / share_sum, validation / share_sum, test / share_sum
