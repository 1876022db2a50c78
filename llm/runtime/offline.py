"""The variables that forbid the Hugging Face libraries to use the network."""

import os

_VARIABLES = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE")
_TRUE = ("1", "ON", "TRUE", "YES")


def offline_variable() -> str | None:
    """Return the variable that keeps the libraries from the network; None if none is set."""
    return next((name for name in _VARIABLES if os.environ.get(name, "").upper() in _TRUE), None)


def offline_remark() -> str:
    """Return a remark in brackets for a message about the Hub; empty without such a variable."""
    name = offline_variable()
    return "" if name is None else f" ({name} is set)"
