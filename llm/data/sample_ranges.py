"""Ranges of sample numbers, as `--skip_samples` names them."""

from llm.errors import ConfigError

_MOST_SAMPLES = 2**62  # beyond them, numbers would overflow


def skipped_ranges(text: str | None) -> list[tuple[int, int]]:
    """Return the ranges that `skip_samples` names, each as its first number and the one after it.

    Raises:
        ConfigError: They are no ranges.
    """
    ranges = []
    for item in text.split(",") if text else ():
        first, colon, stop = item.strip().partition(":")
        digits = first.isascii() and first.isdigit() and stop.isascii() and stop.isdigit()
        if not (colon and digits and int(first) < int(stop) <= _MOST_SAMPLES):
            raise ConfigError(
                f"--skip_samples {text}: '{item.strip()}' is not FIRST:STOP, two growing numbers "
                "of samples such as 6400:6480."
            )
        ranges.append((int(first), int(stop)))
    return ranges
