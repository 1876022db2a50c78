"""The setting of torch's allocator of GPU memory."""

import os

_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


def expand_segments() -> None:
    """Let segments of GPU memory grow, unless the user has set the allocator up; call before CUDA.

    A free block then serves larger tensors too once its segment has grown: less memory is lost to
    gaps where the shapes of tensors change, as between training, evaluation and saving.
    """
    if not any(name in os.environ for name in _VARIABLES):
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"


def allocator_settings() -> str:
    """Return what the allocator is told, in torch's order of the variables."""
    found = (os.environ[name] for name in _VARIABLES if name in os.environ)
    return next(found, "defaults")
