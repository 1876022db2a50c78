"""A program in another process, which an interruption stops as Ctrl-C does in a shell."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Collection, Iterator, Sequence
from typing import Any, Self

from llm.errors import ProgramError
from llm.runtime.signals import CALLER_VARIABLE

_EXIT_INTERRUPTED = 130
_NUM_SHOWN_LINES = 30
_TORCHRUN_REPORT = re.compile(
    r"^.*\btorch[/.]distributed[/.]elastic\b.*(?:failed \(|closing signal|death signal).*$",
    flags=re.MULTILINE,
)
"""A line that torchrun writes once a process has failed; it writes others before, as on macOS."""


class ChildProcess:
    """A program without standard input; a context around it passes interruptions on.

    It has its own process group, so that an interruption of this process reaches it once. A trainer
    also ends if this process dies.

    Args:
        command: The arguments of the command.
        is_merged: Whether standard error goes into standard output.

    Attributes:
        is_interrupted: Whether this process was interrupted, and has passed that on.
    """

    def __init__(self, command: Sequence[str], *, is_merged: bool = False) -> None:
        self.is_interrupted = False
        self._command, self._is_merged = command, is_merged
        self._handler: Any = None
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        """Start the program; from here on interruptions do not raise KeyboardInterrupt.

        Python delivers signals to the main thread, so that only a call there is interrupted.
        """
        if threading.current_thread() is threading.main_thread():
            self._handler = signal.signal(signal.SIGINT, self._interrupt)
        try:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT if self._is_merged else subprocess.PIPE,
                encoding="utf-8",
                errors="replace",
                env={**os.environ, CALLER_VARIABLE: str(os.getpid())},
                start_new_session=True,
            )
        except BaseException:
            self._restore_handler()
            raise
        if self.is_interrupted:  # before it was started
            self._interrupt()
        return self

    def __exit__(self, *exception: object) -> None:
        """Wait until the program has ended, after an interruption if the context raises."""
        assert self._process is not None
        if exception[0] is not None and self._process.poll() is None:
            self._interrupt()
            self._process.communicate()
        self._restore_handler()

    def _restore_handler(self) -> None:
        if self._handler is not None:
            signal.signal(signal.SIGINT, self._handler)

    def lines(self) -> Iterator[str]:
        """Yield the lines of standard output."""
        assert self._process is not None
        assert self._process.stdout is not None
        yield from self._process.stdout

    def finish(self) -> tuple[str, str, int]:
        """Wait until the program has ended.

        Returns:
            The rest of standard output, standard error (empty if it is merged), and the exit code.

        Raises:
            KeyboardInterrupt: This process was interrupted, and the program has ended.
        """
        assert self._process is not None
        output, errors = self._process.communicate()
        exit_code = self._process.returncode
        if self.is_interrupted or exit_code == _EXIT_INTERRUPTED:
            raise KeyboardInterrupt
        return output, errors or "", exit_code

    def _interrupt(self, *signal_arguments: object) -> None:
        """Send Ctrl-C to the processes of the program."""
        self.is_interrupted = True
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
                os.killpg(self._process.pid, signal.SIGINT)


def program_command(program: str, arguments: Sequence[str]) -> list[str]:
    """Return the command that starts a program of this package."""
    return [sys.executable, "-m", "llm", program, *arguments]


def run_program(
    program: str, arguments: Sequence[str], *, expected_codes: Collection[int] = (0,)
) -> tuple[str, int]:
    """Run a program of this package.

    Args:
        program: Its name.
        arguments: Its arguments.
        expected_codes: The exit codes that are not errors.

    Returns:
        Standard output, and the exit code.

    Raises:
        ProgramError: The program has ended with another exit code.
        KeyboardInterrupt: This process was interrupted, and the program has ended.
    """
    with ChildProcess(program_command(program, arguments)) as child:
        output, errors, exit_code = child.finish()
    if exit_code not in expected_codes or (exit_code != 0 and not output):
        raise make_program_error(program, errors, exit_code)
    return output, exit_code


def make_program_error(program: str, output: str, exit_code: int) -> ProgramError:
    """Return an error with the sentence of a program, or its last lines if it has written none."""
    sentence = re.search(r"^(?:\[rank \d+\] )?error: (.*)$", output, flags=re.MULTILINE)
    if sentence is not None:
        return ProgramError(sentence[1], exit_code=exit_code)
    report = _TORCHRUN_REPORT.search(output)
    if report is not None:
        # The cause is in the lines of the process. Torchrun only adds the rank and the exit code.
        output = output[: report.start()] + report[0]
    last_lines = "\n".join(output.splitlines()[-_NUM_SHOWN_LINES:])
    return ProgramError(
        f"llm-trainers {program} ended with exit code {exit_code}. Its last lines:\n{last_lines}",
        exit_code=exit_code,
    )
