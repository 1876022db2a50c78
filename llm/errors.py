"""The errors that this package raises on purpose.

Each message is a full sentence that names the option, its value and what to do.
"""


class LLMError(Exception):
    """An error whose message is all that the user needs to read.

    Args:
        message: One full sentence: the option, the value, the remedy.
        reported: It has been logged already.

    Attributes:
        found_here: Only this rank can find the error, so it prints it.
    """

    found_here = False

    def __init__(self, message: str, *, reported: bool = False) -> None:
        super().__init__(message)
        self.reported = reported


class ConfigError(LLMError):
    """An option, or a combination of options, that cannot work."""


class DataError(LLMError):
    """Text or token files that are missing, broken or too small."""


class CheckpointError(LLMError):
    """A checkpoint that is absent, damaged or does not fit."""


class NotFiniteError(CheckpointError):
    """A state with an infinite or undefined number, which is never saved."""


class DivergedError(LLMError):
    """A training without a finite loss or gradient, or a model without finite logits."""


class RestartError(DivergedError):
    """A divergence after which training goes back to its newest checkpoint, if it has one.

    Args:
        message: As for every error, for a run without a checkpoint.
        first: The first step, counted from 0, whose samples are left out, up to the present one.
        reason: Why the run goes back, for the log.
    """

    def __init__(self, message: str, *, first: int, reason: str) -> None:
        super().__init__(message)
        self.first, self.reason = first, reason


class ParallelError(LLMError):
    """Ranks, devices or precisions that the machine does not offer."""


class DeviceMemoryError(LLMError):
    """A device with less memory than the run needs."""


class PeerLostError(LLMError):
    """Another rank has died or hangs, which the watchdog has logged."""


def one_line(error: BaseException) -> str:
    """Return another library's error as one line of at most 240 characters, without a full stop.

    Of an error that wraps those of several ranks, it is the first one.
    """
    failures = getattr(error, "failures", None)  # of torch.distributed.checkpoint
    if failures:
        error = next(iter(failures.values()))[0]
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    text = " ".join(str(error).split()).rstrip(".") or type(error).__name__
    return text if len(text) <= 240 else f"{text[:237]}..."
