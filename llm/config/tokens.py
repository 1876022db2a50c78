"""Numbers of tokens as people write them: 20B, 1.5M, 300K."""

import re
from fractions import Fraction
from typing import Self

_SUFFIXES = ("", "K", "M", "B", "T")


class Tokens(int):
    """A number of tokens; in text, a suffix K, M, B or T multiplies by a power of 1,000.

    Raises:
        ValueError: The text is not a whole number of tokens.
    """

    def __new__(cls, value: int | str) -> Self:
        """Parse a number of tokens such as "1.5M"."""
        if isinstance(value, str):
            match = re.fullmatch(r"([\d_]+(?:\.\d+)?)([KMBT]?)", value, re.IGNORECASE)
            if match is None:
                raise ValueError(f"{value!r} is not a number of tokens")
            # Fractions are exact; in floating point, 0.3B would not be a whole number.
            exact = Fraction(match[1]) * 1000 ** _SUFFIXES.index(match[2].upper())
            if exact.denominator != 1:
                raise ValueError(f"{value!r} is not a whole number of tokens")
            value = int(exact)
        return super().__new__(cls, value)
