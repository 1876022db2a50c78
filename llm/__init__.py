"""Pretraining of GPT-like language models, exact and fast."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llm.tools.python.functions import evaluate, generate, plan, train
    from llm.tools.python.trained_run import Run

__version__ = "0.2.0"
__all__ = ["Run", "__version__", "evaluate", "generate", "plan", "train"]


def __getattr__(name: str) -> Any:
    """Import the functions of the programs when one is used: the package itself loads nothing."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    module = "trained_run" if name == "Run" else "functions"
    return getattr(importlib.import_module(f"llm.tools.python.{module}"), name)
