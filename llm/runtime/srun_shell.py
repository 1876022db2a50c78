"""The shell of `srun --pty`, which has the variables of several tasks although only one works."""

import functools
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

_SHELLS = ("bash", "csh", "dash", "fish", "ksh", "sh", "tcsh", "zsh")


def in_shell_of_srun(environ: Mapping[str, str]) -> bool:
    """Return whether the user typed this command into the shell of a job step.

    `srun -n 4 --pty bash` starts four shells. Slurm gives a terminal to the first, and the others
    end at once.
    """
    return "SLURM_PTY_PORT" in environ and _has_interactive_parent()


@functools.cache
def _has_interactive_parent() -> bool:
    """Return whether a shell that reads commands from its user is between Slurm and this process.

    A job step inside the shell inherits its variables, but its tasks are children of Slurm.
    """
    process = os.getppid()
    while process > 1:
        try:
            command = Path(f"/proc/{process}/cmdline").read_bytes().decode(errors="replace")
            status = Path(f"/proc/{process}/stat").read_text(encoding="utf-8", errors="replace")
        except OSError:  # of another user, and hidden
            return False
        if "slurmstepd" in status:
            return False
        if is_interactive_shell(command.rstrip("\0").split("\0")):
            return True
        process = int(status.rpartition(")")[2].split()[1])  # the name may contain blanks
    return False


def is_interactive_shell(command: Sequence[str]) -> bool:
    """Return whether a command is a shell without a script."""
    name = Path(command[0]).name.removeprefix("-")
    options = command[1:]
    return name in _SHELLS and all(word.startswith("-") and word != "-c" for word in options)
