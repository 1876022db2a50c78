"""Numbers on paper: axes with round ticks, and numbers in few characters."""

import dataclasses
import math
from typing import Literal

X = Literal["step", "tokens", "seconds"]
X_KEYS: tuple[X, ...] = ("step", "tokens", "seconds")

_UNITS_OF_TIME = ((4 * 86400, 86400, "days"), (7200, 3600, "hours"), (120, 60, "minutes"))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Axis:
    """A range of numbers on one side of a chart.

    Attributes:
        low: Where it begins.
        high: Where it ends, above `low`.
        log: Whether equal distances are equal ratios; `low` is positive then.
        divisor: What numbers are divided by when they are shown, such as 3600 for hours.
        title: What is shown, with its unit.
    """

    low: float
    high: float
    log: bool = False
    divisor: float = 1.0
    title: str = ""

    def place(self, value: float) -> float:
        """Where a value lies: 0 at the low end, 1 at the high end."""
        if self.log:
            value = max(value, self.low)
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    def ticks(self) -> list[tuple[float, str]]:
        """Where the grid lines are, between 0 and 1, and what they are called."""
        if self.log:
            numbers = _log_ticks(self.low, self.high)
            return [(self.place(number), short(number)) for number in numbers]
        low, high = self.low / self.divisor, self.high / self.divisor
        spacing = _round_step((high - low) / 5)
        first, last = math.ceil(low / spacing - 1e-9), math.floor(high / spacing + 1e-9)
        return [
            (self.place(number * spacing * self.divisor), short(number * spacing, like=spacing))
            for number in range(first, last + 1)
        ]


def x_axis(key: X, *, low: float, high: float) -> Axis:
    """The x axis of steps, tokens or time from `low` to a little more than `high`."""
    high = low + 1.02 * (high - low) if high > low else low + 1.0
    if key == "seconds":
        for at_least, divisor, unit in _UNITS_OF_TIME:
            if high >= at_least:
                return Axis(low=low, high=high, divisor=divisor, title=f"{unit} of training")
        return Axis(low=low, high=high, title="seconds of training")
    return Axis(low=low, high=high, title={"step": "steps", "tokens": "tokens"}[key])


def y_axis(values: list[float], *, from_zero: bool, log: bool) -> Axis:
    """The y axis that shows all values.

    Args:
        values: What is drawn; may be empty.
        from_zero: Let the axis begin at zero.
        log: Use a logarithmic axis if the values are positive and span more than a factor of 30.
    """
    low, high = (min(values), max(values)) if values else (0.0, 1.0)
    if log and low > 0 and high / low > 30:
        return Axis(low=low / 1.2, high=high * 1.2, log=True)
    if from_zero and low >= 0:
        low = 0.0
    margin = (high - low) * 0.06 or abs(high) * 0.1 or 1.0
    return Axis(low=low if from_zero and low == 0.0 else low - margin, high=high + margin)


def short(value: float, *, like: float | None = None) -> str:
    """A number in few characters: 1.2k, 3.5M, 0.0003.

    Args:
        value: The number.
        like: A number, the spacing of ticks for example, that gives the number of decimals.
    """
    if abs(value) <= (like or 0.0) / 1e6:
        return "0"
    if (like or abs(value)) < 1e-3 or abs(value) >= 1e15:
        mantissa, _, exponent = f"{value:.2e}".partition("e")
        return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"
    for power, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= power * 0.99995:
            return _trimmed(value / power, 3 if like is None else 6) + letter
    return _trimmed(value, 4 if like is None else 6)


def whole(value: float) -> str:
    """A whole number with all of its digits up to a million, in few characters above."""
    return f"{value:,.0f}" if abs(value) < 1e6 else short(value)


def duration(seconds: float) -> str:
    """A time as people say it: 42 s, 3 min 20 s, 5 h 07 min, 2 d 4 h."""
    if seconds < 100:
        return f"{seconds:.3g} s"
    if seconds < 3600:
        return f"{int(seconds // 60)} min {int(seconds % 60):02d} s"
    if seconds < 2 * 86400:
        return f"{int(seconds // 3600)} h {int(seconds % 3600 // 60):02d} min"
    return f"{int(seconds // 86400)} d {int(seconds % 86400 // 3600)} h"


def _trimmed(value: float, digits: int) -> str:
    text = f"{value:.{digits}g}"
    if "e" in text:
        text = f"{value:.0f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def _round_step(rough: float) -> float:
    power = 10.0 ** math.floor(math.log10(rough))
    return power * next(factor for factor in (1, 2, 5, 10) if factor * power >= 0.75 * rough)


def _log_ticks(low: float, high: float) -> list[float]:
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    factors = (1.0, 2.0, 5.0) if math.log10(high / low) < 2.5 else (1.0,)
    ticks = [factor * 10.0**decade for decade in decades for factor in factors]
    return [tick for tick in ticks if low <= tick <= high]
