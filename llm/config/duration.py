"""Durations with a unit, such as `600 steps` or `2.5B tokens`, and numbers of tokens."""

import re
from fractions import Fraction
from typing import Literal, Self, get_args

Unit = Literal["steps", "samples", "tokens", "epochs", "tokens per parameter"]

_THOUSANDS_SUFFIXES = ("", "K", "M", "B", "T")
"""The suffix at index i multiplies by 1000 to the power of i."""


def _parse_number(text: str) -> Fraction:
    """Return a number as an exact fraction; a suffix K, M, B or T multiplies by a power of 1,000.

    Raises:
        ValueError: The text is not a number.
    """
    match = re.fullmatch(r"(-?[\d_]+(?:\.\d+)?(?:e[+-]?\d{1,3})?)([KMBT]?)", text, re.IGNORECASE)
    if match is None:
        raise ValueError(f"{text!r} is not a number")
    # In floating point, 0.3B would not be a whole number.
    multiplier: int = 1000 ** _THOUSANDS_SUFFIXES.index(match[2].upper())
    return Fraction(match[1]) * multiplier


class Tokens(int):
    """A number of tokens; in text, a suffix K, M, B or T multiplies by a power of 1,000.

    Raises:
        ValueError: The text is not a whole number of tokens.
    """

    def __new__(cls, value: int | str) -> Self:
        """Parse a number of tokens such as "1.5M"."""
        if isinstance(value, str):
            number = _parse_number(value)
            if number.denominator != 1 or number < 0:
                raise ValueError(f"{value!r} is not a whole number of tokens")
            value = int(number)
        return super().__new__(cls, value)


class Duration(str):
    """A number of steps, samples, tokens or epochs, as its text: `600 steps`, `2.5B tokens`.

    Equal durations of one unit have the same text, so files and checkpoints record it as a string.

    Attributes:
        value: The number; whole, except for `tokens per parameter`.
        unit: The unit, in the plural.

    Raises:
        ValueError: The text is not a number and a unit, or the number has to be whole.
    """

    value: int | float
    unit: Unit

    def __new__(cls, text: str) -> Self:
        """Parse a duration; the unit may be singular, and the blank before it left out."""
        match = re.fullmatch(r"\s*(\S*?)\s*([a-z]{3,}[a-z ]*)", text)
        units: tuple[Unit, ...] = get_args(Unit)
        unit_by_name = {unit: unit for unit in units} | {
            unit.removesuffix("s"): unit for unit in units
        }
        if match is None or match[2] not in unit_by_name:
            raise ValueError(f"{text!r} is not a number and a unit")
        number_text, unit_name = match.groups()
        unit, number = unit_by_name[unit_name], _parse_number(number_text)
        if unit != "tokens per parameter" and number.denominator != 1:
            raise ValueError(f"{text!r} is not a whole number of {unit}")
        value = int(number) if number.denominator == 1 else float(number)
        duration = super().__new__(cls, f"{value} {unit.removesuffix('s') if value == 1 else unit}")
        duration.value, duration.unit = value, unit
        return duration
