"""Standard output and standard error: they take any text, and no text controls a terminal."""

import contextlib
import io
import os
import re
import sys
from typing import IO

_CONTROL_CHARACTERS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # all but tab and line feed


def escape_unencodable_output() -> None:
    """Let standard output and standard error escape characters that their encoding lacks.

    A stream that the parent process has closed becomes the null device.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def escape_controls(text: str) -> str:
    r"""Return text that cannot change a terminal: an escape character becomes `\x1b`."""
    return _CONTROL_CHARACTERS.sub(lambda match: rf"\x{ord(match[0]):02x}", text)


def text_for(stream: IO[str], text: str) -> str:
    """Return text as a stream gets it: for a terminal, control characters are escaped."""
    return escape_controls(text) if stream.isatty() else text


def discard_output() -> None:
    """Send what is left in standard output, and what follows, to the null device.

    Otherwise Python would try again to write it when it ends, and would exit with code 120.
    """
    with contextlib.suppress(OSError), open(os.devnull, "w", encoding="utf-8") as null:
        os.dup2(null.fileno(), sys.stdout.fileno())


def flush_output() -> bool:
    """Write what is left of standard output, or discard it if it cannot be written.

    Returns:
        Whether it was written.
    """
    try:
        sys.stdout.flush()
    except OSError:
        discard_output()
        return False
    return True
