"""Hugging Face libraries without the network, because of a variable or of the program."""

import contextlib
import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path

from llm.errors import LLMError, one_line

_CLIENT_VARIABLE = "HF_HUB_OFFLINE"
_VARIABLES = (_CLIENT_VARIABLE, "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE")
_TRUE = ("1", "ON", "TRUE", "YES")
_CONNECT_TIMEOUT_SECONDS = 10
_RETRY_SECONDS = 3

logger = logging.getLogger("llm.runtime")


def offline_variable() -> str | None:
    """Return the variable that keeps the libraries from the network; None if none is set."""
    return next((name for name in _VARIABLES if os.environ.get(name, "").upper() in _TRUE), None)


def offline_remark() -> str:
    """Return a remark in brackets for a message about the Hub; empty if no variable is set."""
    name = offline_variable()
    return "" if name is None else f" ({name} is set)"


@contextlib.contextmanager
def forbid_downloads() -> Iterator[None]:
    """Keep the libraries from the network, in this process and in those that it starts meanwhile.

    A program that reads a folder must not fetch what a file in the folder names. Files in the Hub's
    cache can be read.

    Raises:
        LLMError: Raised inside; if it is about the Hub, with a sentence about this command.
    """
    try:
        with _offline():
            yield
    except LLMError as error:
        if "Hugging Face Hub" not in str(error):
            raise
        raise type(error)(
            f"{error} This command downloads nothing: it finds only what is on this machine."
        ) from error


@contextlib.contextmanager
def offline_if_unreachable(name: str | None) -> Iterator[None]:
    """Keep the libraries from the network if the Hub cannot be reached; they read its cache.

    By themselves they wait 23 s for each file that is not in the cache, and minutes where a
    firewall drops packets.

    Args:
        name: The model, tokenizer or data set to load. Nothing happens if it is None or a local
            path.
    """
    is_local = name is None or Path(name).is_absolute() or Path(name).exists()
    problem = None if is_local else find_connection_problem()
    if problem is None:
        yield
        return
    logger.warning(f"the Hugging Face Hub cannot be reached ({problem}): only its cache is read")
    with _offline():
        yield


def find_connection_problem() -> str | None:
    """Try to connect to the Hub for a few seconds.

    Returns:
        Why no connection is possible; None if one is, if the Hub's client has to decide (a proxy
        fails, an answer takes long), or if downloads are forbidden.
    """
    from huggingface_hub import constants, get_session

    end = time.monotonic() + _RETRY_SECONDS
    while not (constants.HF_HUB_OFFLINE or offline_variable()):
        try:
            get_session().head(constants.ENDPOINT, timeout=_CONNECT_TIMEOUT_SECONDS)
        except Exception as error:  # its HTTP library differs with its version
            if "Connect" not in type(error).__name__:
                return None
            if time.monotonic() >= end:
                return one_line(error)
            time.sleep(1)
        else:
            return None
    return None


@contextlib.contextmanager
def _offline() -> Iterator[None]:
    """Keep the libraries from the network, in this process and in those that it starts."""
    from huggingface_hub import constants

    variable, setting = os.environ.get(_CLIENT_VARIABLE), constants.HF_HUB_OFFLINE
    os.environ[_CLIENT_VARIABLE], constants.HF_HUB_OFFLINE = "1", True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = setting
        if variable is None:
            del os.environ[_CLIENT_VARIABLE]
        else:
            os.environ[_CLIENT_VARIABLE] = variable
