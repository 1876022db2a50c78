"""Compilation of a model by torch.compile, block by block."""

import os
import shutil

import torch
import torch._dynamo
from torch import nn
from torch.utils._triton import has_triton

from llm.models.sizes import find_blocks


def compiles_by_default(device: torch.device) -> bool:
    """Return whether models are compiled on a device unless the options say otherwise.

    Triton needs a C compiler for the code that launches its kernels, which images of containers
    often lack.
    """
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    return device.type == "cuda" and compiler is not None and has_triton()


def compile_blocks(model: nn.Module) -> None:
    """Compile the blocks of a model, in place, when they first run.

    One graph serves all blocks that are alike. What runs between them stays eager, as FSDP's
    collectives, pipeline stages and the lookup of a tied embedding do. A block that cannot be
    compiled runs as it is, with torch's warning.

    Args:
        model: Not sharded yet: FSDP's hooks then run around the graphs.
    """
    torch._dynamo.config.suppress_errors = True
    for block in find_blocks(model):
        block.compile()
