"""Common parts of the programs: an error becomes a sentence and an exit code."""

import functools
import signal
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from llm.config.terminal import discard_output, escape_unencodable_output, flush_output, text_for
from llm.errors import LLMError, explain_wrapped_os_error

COMMAND = "llm-trainers"
"""The command that starts every program by its name."""


class Program(NamedTuple):
    """A program of the command.

    Attributes:
        target: The module, and the function that runs the program.
        purpose: A phrase for `--help`, such as "pretrain a model".
    """

    target: str
    purpose: str


class Main(Protocol):
    """A program as a function of its command line, by default the process's."""

    def __call__(self, argv: Sequence[str] | None = None) -> int: ...  # noqa: D102


def program(main: Callable[[Sequence[str]], int]) -> Main:
    """Make a program from a function that takes the command line and returns an exit code.

    Errors that the user can fix are printed to stderr as one sentence, and the exit code is 2.
    After Ctrl-C it is 130.
    """

    @functools.wraps(main)
    def run(argv: Sequence[str] | None = None) -> int:
        escape_unencodable_output()
        try:
            exit_code = main(sys.argv[1:] if argv is None else argv)
            sys.stdout.flush()
        except BrokenPipeError:  # the reader, such as `head`, has closed the pipe
            discard_output()
            return 128 + signal.SIGPIPE
        except LLMError as error:
            return _report_error(str(error))
        except KeyboardInterrupt:
            sys.stderr.write("Interrupted.\n")
            return 130
        except Exception as error:
            if isinstance(error, OSError) and error.filename is None and not flush_output():
                error.filename = "standard output"
            sentence = explain_wrapped_os_error(error)
            if sentence is None:
                raise
            return _report_error(sentence)
        return exit_code

    return run


def _report_error(sentence: str) -> int:
    """Print an error that the user can fix to stderr, and return its exit code."""
    sys.stderr.write(text_for(sys.stderr, f"error: {sentence}\n"))
    return 2
