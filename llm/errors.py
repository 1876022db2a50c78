"""The errors that this package raises on purpose, and sentences for the system's errors.

Each message is a full sentence that names the option, its value and what to do.
"""

import errno
import io
import json
import os
import re
import traceback
from typing import Any


class LLMError(Exception):
    """An error with a message that tells the user everything: the option, the value, the remedy.

    Attributes:
        found_here: Whether only this rank can find the error, so that this rank prints it.
    """

    found_here = False


class ConfigError(LLMError):
    """An option, or a combination of options, cannot work."""


class DataError(LLMError):
    """Text or token files are missing, broken or too small."""


class CheckpointError(LLMError):
    """A checkpoint is missing, damaged or does not fit."""


class NotFiniteError(CheckpointError):
    """A state contains an infinite number or NaN; it is never saved."""


class DivergedError(LLMError):
    """The loss or gradient of a training run, or a model's logits, are not finite."""


class RestartError(DivergedError):
    """Training diverged and restarts from its newest checkpoint, if it has one.

    Args:
        message: Printed if the run has no checkpoint.
        first: First step to skip, counted from 0.
        end: The step after the last one to skip.
        reason: Why the run goes back, for the log.
    """

    def __init__(self, message: str, *, first: int, end: int, reason: str) -> None:
        super().__init__(message)
        self.first, self.end, self.reason = first, end, reason


class ParallelError(LLMError):
    """The machine does not offer the ranks, devices or precisions."""


class DeviceMemoryError(LLMError):
    """A device has less memory than the run needs."""


class PeerLostError(LLMError):
    """Another rank has died or hangs.

    Args:
        message: Which rank, and why.
        reported: Whether the watchdog has logged it.
    """

    def __init__(self, message: str, *, reported: bool = False) -> None:
        super().__init__(message)
        self.reported = reported


class ProgramError(LLMError, ValueError):
    """A program that a function such as `llm.train` has started refuses its options, or fails.

    Args:
        message: The sentence of the program.
        exit_code: The exit code of the program; None if it was not started.
    """

    def __init__(self, message: str, *, exit_code: int | None = None) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def one_line(error: BaseException) -> str:
    """Return another library's error as one line of at most 240 characters, without a full stop.

    If it wraps errors of several ranks, the first one is returned.
    """
    error = _unwrap_first_error(error)
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    if isinstance(error, json.JSONDecodeError):
        return f"malformed JSON at line {error.lineno}, column {error.colno}"
    if isinstance(error, UnicodeDecodeError):
        return f"byte {error.start + 1} is not UTF-8 text"
    if isinstance(error, KeyError):  # its text is the key alone
        return f"the key {error} is missing"
    text = " ".join(str(error).split()).rstrip(".") or type(error).__name__
    return text if len(text) <= 240 else f"{text[:237]}..."


_UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)
_REMEDIES = {
    errno.ENOSPC: "free some space",
    errno.EDQUOT: "free some space, or ask for a larger quota",
    errno.EFBIG: "raise the limit on the size of files (ulimit -f)",
    errno.EROFS: "name a path on another file system",
    errno.EACCES: "ask for the permission, or name another path",
    errno.EPERM: "ask for the permission, or name another path",
    errno.EMFILE: "raise the limit on open files (ulimit -n)",
    errno.ENOMEM: "free some memory, or raise the limit on it (ulimit -v)",
    errno.ENAMETOOLONG: "choose a shorter name",
}
_FAILED_STORAGE = (
    *(errno.EIO, errno.ESTALE, errno.ENOTCONN, errno.ESHUTDOWN, errno.ECONNRESET),
    *(errno.ECONNABORTED, errno.ETIMEDOUT, errno.EHOSTDOWN, errno.ENODEV, errno.ENXIO),
)
_REMEDIES |= dict.fromkeys(
    _FAILED_STORAGE,
    "the disk, or the server of the file system, has failed: start again when it works",
)


def explain_os_error(error: OSError) -> str:
    """Return a sentence about an error of the operating system: path, reason and remedy."""
    if error.errno is None:  # a library's error, which is complete
        return f"{one_line(error)}."
    path = _find_file_path(error)
    if path is None:
        failure = _describe_failed_call(error)
    elif error.filename2 is not None:
        failure = f"{path} cannot be renamed to {error.filename2}"
    else:
        verb = "written" if error.errno in _UNWRITABLE else "used"
        failure = f"{path} cannot be {verb}"
    remedy = f"; {_REMEDIES[error.errno]}" if error.errno in _REMEDIES else ""
    return f"{failure}: {one_line(error)}{remedy}."


def explain_wrapped_os_error(error: Exception) -> str | None:
    """Return a sentence about an OSError, or about one that another error describes; else None.

    Libraries in Rust and C++ raise their own errors, with the system's in the text.
    """
    if isinstance(error, OSError):
        return explain_os_error(error)
    system_error = extract_os_error(error, "")
    if system_error is None:
        return None
    return f"{one_line(error)}; {os_error_remedy(system_error)}."


def os_error_remedy(error: OSError) -> str:
    """Return what a user can do about an error of the operating system, as an imperative."""
    return _REMEDIES.get(error.errno or 0, "check the path")


def one_line_with_path(error: BaseException) -> str:
    """Return what `one_line` does, after the path if the operating system has refused a file."""
    error = _unwrap_first_error(error)
    path = _find_file_path(error) if isinstance(error, OSError) else None
    return one_line(error) if path is None else f"{path}: {one_line(error)}"


def extract_os_error(error: BaseException, path: object) -> OSError | None:
    """Return the error of the operating system that another library's error describes, or None.

    Libraries in Rust and C++ raise their own errors, with the system's in the text.

    Args:
        error: The library's error.
        path: The file or folder that the library was using.
    """
    error = _unwrap_first_error(error)
    if isinstance(error, OSError) and error.errno is not None:
        return OSError(error.errno, error.strerror, error.filename or str(path))
    for error_number in map(int, re.findall(r"\((?:os error )?(\d{1,3})\)", str(error))):
        if (reason := os.strerror(error_number)) in str(error):
            return OSError(error_number, reason, str(path))
    return None


def _unwrap_first_error(error: BaseException) -> BaseException:
    """Return the error of the first rank that an error of several ranks contains, or the error."""
    failures: Any = getattr(error, "failures", None)  # of torch.distributed.checkpoint
    return next(iter(failures.values()))[0] if failures else error


def _find_file_path(error: OSError) -> str | None:
    """Return the path of the file that an error is about, or None.

    The error of a failed read or write has no path: it is the open file of the failing function.
    """
    if error.filename is not None:
        return str(error.filename)
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    if not frames:
        return None
    for local_value in frames[-1].f_locals.values():
        if isinstance(local_value, io.IOBase):
            file_name = getattr(local_value, "name", None)
            if isinstance(file_name, str | os.PathLike):
                return os.fspath(file_name)
    return None


def _describe_failed_call(error: OSError) -> str:
    """Return a clause that names the function with the call that failed, for an error without path.

    Args:
        error: The error, with its traceback.
    """
    stack_frames = traceback.extract_tb(error.__traceback__)
    if not stack_frames:
        return "A call of the system failed"
    frame = stack_frames[-1]
    return f"A call of the system in {frame.name} ({frame.filename}:{frame.lineno}) failed"
