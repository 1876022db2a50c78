"""Hugging Face libraries without the network, because of a variable or of the program."""

import contextlib
import os
from collections.abc import Iterator

from llm.errors import LLMError

_CLIENT_VARIABLE = "HF_HUB_OFFLINE"
_VARIABLES = (_CLIENT_VARIABLE, "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE")
_TRUE = ("1", "ON", "TRUE", "YES")


def offline_variable() -> str | None:
    """Return the variable that keeps the libraries from the network; None if none is set."""
    return next((name for name in _VARIABLES if os.environ.get(name, "").upper() in _TRUE), None)


def offline_remark() -> str:
    """Return a remark in brackets for a message about the Hub; empty without such a variable."""
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
    from huggingface_hub import constants

    variable, setting = os.environ.get(_CLIENT_VARIABLE), constants.HF_HUB_OFFLINE
    os.environ[_CLIENT_VARIABLE], constants.HF_HUB_OFFLINE = "1", True
    try:
        yield
    except LLMError as error:
        if "Hugging Face Hub" not in str(error):
            raise
        raise type(error)(
            f"{error} This command downloads nothing: it finds only what is on this machine."
        ) from error
    finally:
        constants.HF_HUB_OFFLINE = setting
        if variable is None:
            del os.environ[_CLIENT_VARIABLE]
        else:
            os.environ[_CLIENT_VARIABLE] = variable
