"""Kernels that add numbers in a fixed order, so that every run on GPUs gives the same bits."""

import contextlib
import os
from collections.abc import Iterator

from llm.errors import ParallelError


@contextlib.contextmanager
def deterministic_kernels() -> Iterator[None]:
    """Choose deterministic kernels; enter it before the first matrix product on a GPU.

    Some kernels add atomically, in an order that differs from run to run: the backward passes of
    flash attention and of embeddings, and cuBLAS when streams share its workspace.

    Raises:
        ParallelError: An operation has no deterministic kernel.
    """
    import torch

    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # a workspace for each stream
    os.environ["FLASH_ATTENTION_DETERMINISTIC"] = "1"  # read by transformers
    torch.use_deterministic_algorithms(True)
    # Otherwise every new tensor is filled first, which does not change a correct program's results.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    try:
        yield
    except RuntimeError as error:
        if "does not have a deterministic implementation" not in str(error):
            raise
        raise ParallelError(
            f"--deterministic: {str(error).split(',')[0]} on this device; leave the option out, or "
            "choose another --attention_implementation or model."
        ) from error
