"""Compilation of a model by torch.compile, block by block."""

import functools
import os
import shutil
from collections.abc import Callable
from typing import Any

import torch
import torch._dynamo
from torch import nn
from torch.utils._triton import has_triton

from llm.models.sizes import find_blocks

_RECOMPILE_LIMIT = 64
"""Graphs of one function: one per batch shape, mode and kind of block.

With PyTorch's limit of 8, further graphs would run uncompiled, with a warning."""


def can_compile(device: torch.device) -> bool:
    """Return whether Triton can compile kernels for a device.

    Triton needs a C compiler for the code that launches its kernels, and container images often
    lack one.
    """
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    return device.type == "cuda" and compiler is not None and has_triton()


def compile_blocks(model: nn.Module, *, fuse_backward: bool = False) -> None:
    """Compile the blocks of a model, in place, when they first run.

    Equal blocks share one graph. Each batch shape has a separate graph: otherwise the second shape
    would get a slower graph for all sizes, and training would keep it if an evaluation with another
    batch size came first. Code between blocks stays eager: FSDP's collectives, pipeline stages and
    the lookup of a tied embedding. A block that cannot be compiled runs uncompiled, with torch's
    warning. Make the loss before: it runs norms in a dispatch mode, and Dynamo never compiles a
    function that it has met in one.

    Args:
        model: A model that is not sharded yet, so that FSDP's hooks run around the graphs.
        fuse_backward: Whether to use the kernels of `fused_backward`, and to compile the norms
            between and after blocks, too. They need a GPU with Triton.
    """
    torch._dynamo.config.suppress_errors = True
    # Otherwise DistributedDataParallel's buckets divide the graph of a block, and so its fusions.
    torch._dynamo.config.optimize_ddp = False
    _allow_recompilations()
    blocks: list[nn.Module] = list(find_blocks(model))
    if not fuse_backward:
        for block in blocks:
            block.compile(dynamic=False)
        return
    from llm.models import fused_backward  # imports Triton

    fused_backward.fuse_gelu_backward(model)
    norms = fused_backward.fuse_norms(model)
    inner_modules = {module for block in blocks for module in block.modules()}
    for module in (*blocks, *(norm for norm in norms if norm not in inner_modules)):
        module.compile(dynamic=False, options=fused_backward.inductor_options())


def make_compilation_reproducible() -> None:
    """Let compiled code have the bits of the uncompiled model, and not depend on timings.

    Call it before anything is compiled, with `torch.use_deterministic_algorithms`, which turns off
    most of Inductor's timings already.
    """
    import torch._inductor.config as inductor  # which takes a second

    # Otherwise a fused kernel keeps in float32 what the model rounds to half precision, so that
    # bits depend on what is fused and what is recomputed.
    inductor.emulate_precision_casts = True
    inductor.triton.autotune_pointwise = False  # else the fastest of several kernels is chosen
    inductor.triton.mix_order_reduction = False  # wrong sums in some cases of PyTorch 2.10
    inductor.shape_padding = False
    inductor.compile_threads = 1


@functools.cache
def compile_for_fixed_shapes(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the compiled function, with a separate graph for each input shape."""
    _allow_recompilations()
    return torch.compile(function, dynamic=False)


def _allow_recompilations() -> None:
    limit = torch._dynamo.config.recompile_limit
    torch._dynamo.config.recompile_limit = max(limit, _RECOMPILE_LIMIT)
