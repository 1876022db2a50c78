"""The setting of torch's allocator of GPU memory."""

import os

_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


def expand_segments() -> None:
    """Let segments of GPU memory grow, unless the user has set the allocator up; call before CUDA.

    Once a segment has grown, its free blocks can hold larger tensors too. Less memory is lost to
    gaps when shapes change, for example between training, evaluation and saving.
    """
    if not any(name in os.environ for name in _VARIABLES):
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"


def allocator_settings() -> str:
    """Return the allocator's settings, reading the variables in torch's order."""
    found = (os.environ[name] for name in _VARIABLES if name in os.environ)
    return next(found, "defaults")
