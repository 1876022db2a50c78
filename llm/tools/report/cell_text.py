"""Numbers and options as the text of a table's cells, and tables as lines of text."""

from collections.abc import Sequence


def format_short(value: float) -> str:
    """Return a number in few characters: 1.2k, 3.5M."""
    for power, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= power * 0.9995:
            return f"{value / power:.3g}{letter}"
    return f"{value:.4g}"


def format_count(value: float) -> str:
    """Return a whole number with all of its digits below a million, in few characters above."""
    return f"{value:,.0f}" if abs(value) < 1e6 else format_short(value)


def format_duration(seconds: float) -> str:
    """Return a time in two units: 42 s, 3 min 20 s, 5 h 07 min, 2 d 4 h."""
    if seconds < 100:
        return f"{seconds:.3g} s"
    if seconds < 3600:
        return f"{int(seconds // 60)} min {int(seconds % 60):02d} s"
    if seconds < 2 * 86400:
        return f"{int(seconds // 3600)} h {int(seconds % 3600 // 60):02d} min"
    return f"{int(seconds // 86400)} d {int(seconds % 86400 // 3600)} h"


def format_option(value: object) -> str | None:
    """Return the value of an option as text; None if it is not set."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return " ".join(map(str, value)) or "none"
    return None if value is None else str(value)


def align_columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the rows of a table as lines; each column is as wide as its longest cell."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
