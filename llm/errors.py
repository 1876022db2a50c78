"""The errors that this package raises on purpose.

Each message is a full sentence that names the option, its value and what to do.
"""


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
        first: First step, counted from 0, to skip: the samples from there to the present step are
            left out.
        reason: Why the run goes back, for the log.
    """

    def __init__(self, message: str, *, first: int, reason: str) -> None:
        super().__init__(message)
        self.first, self.reason = first, reason


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


def one_line(error: BaseException) -> str:
    """Return another library's error as one line of at most 240 characters, without a full stop.

    If it wraps errors of several ranks, the first one is returned.
    """
    failures = getattr(error, "failures", None)  # of torch.distributed.checkpoint
    if failures:
        error = next(iter(failures.values()))[0]
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    if isinstance(error, KeyError):  # its text is the key alone
        return f"the key {error} is missing"
    text = " ".join(str(error).split()).rstrip(".") or type(error).__name__
    return text if len(text) <= 240 else f"{text[:237]}..."
