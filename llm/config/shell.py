"""Commands as lines that a user can copy into a shell."""

import os
import re
import shlex
from collections.abc import Iterable
from pathlib import Path


def shell_line(arguments: Iterable[str | Path]) -> str:
    """Return a command as a line for bash.

    Args:
        arguments: The program and its arguments. A path that begins with a dash gets `./` in front,
            because programs take it for an option.
    """
    return " ".join(map(_quote_argument, arguments))


def _quote_argument(argument: str | Path) -> str:
    """Return an argument as bash reads it; other than printable characters are escaped."""
    text = str(argument)
    if isinstance(argument, Path) and text.startswith("-"):
        text = os.path.join(os.curdir, text)
    if text.isprintable():
        return shlex.quote(text)
    # A line break or an escape sequence, or bytes of a file name that are not UTF-8.
    latin_text = os.fsencode(text).decode("latin-1")
    escaped_text = re.sub(r"[^ -~]|['\\]", lambda match: f"\\x{ord(match[0]):02x}", latin_text)
    return f"$'{escaped_text}'"
