"""Registers of the project's Triton kernels, compiled for an H100 on a machine without one.

The functions that launch kernels get tensors on the meta device. Triton compiles a kernel for them
in place of each launch, and the assembler, which comes with Triton, counts its registers.
"""

import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from torch import Tensor
from triton.runtime.jit import JITFunction

from benchmarks.made_up_gpu import H100, made_up_gpu
from llm.models import backward_kernels
from llm.models.softmax_kernel import choose_softmax, softmax_in_place

PTXAS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
"""The assembler; some builds of Triton lack it."""
MAX_SHARED_BYTES = H100.shared_memory_per_block_optin
"""Shared memory of a program, at most."""

_BF16, _FP32 = torch.bfloat16, torch.float32


@dataclass(frozen=True, kw_only=True)
class CompiledKernel:
    """A kernel, compiled for the shapes and dtypes of a launch.

    Attributes:
        name: The Triton function.
        num_warps: Warps of a program.
        registers: Registers of a thread.
        spilled_bytes: Bytes of a thread that are stored to memory because registers are short.
        shared_bytes: Shared memory of a program.
    """

    name: str
    num_warps: int
    registers: int
    spilled_bytes: int
    shared_bytes: int


def compile_launches(launch: Callable[[], object]) -> list[CompiledKernel]:
    """Return the kernels that a function launches, compiled for an H100, in their order.

    Args:
        launch: Launches kernels with tensors on the meta device.
    """
    kernels: list[CompiledKernel] = []
    run = JITFunction.run

    def compile_only(function: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        compiled = run(function, *args, grid=grid, warmup=True, **options)
        kernels.append(_assemble(function.__name__, compiled))

    with made_up_gpu(), mock.patch.object(JITFunction, "run", compile_only):
        launch()
    return kernels


def _assemble(name: str, compiled: Any) -> CompiledKernel:
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "kernel.ptx")
        source.write_text(compiled.asm["ptx"])
        command = [str(PTXAS), "-v", "--gpu-name=sm_90a", str(source), "-o", f"{folder}/cubin"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    registers = re.search(r"Used (\d+) registers", done.stderr)
    spilled = re.search(r"(\d+) bytes spill stores", done.stderr)
    assert registers is not None
    assert spilled is not None
    return CompiledKernel(
        name=name,
        num_warps=compiled.metadata.num_warps,
        registers=int(registers[1]),
        spilled_bytes=int(spilled[1]),
        shared_bytes=compiled.metadata.shared,
    )


def launches() -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield functions that launch each kernel at the shapes of GPT-2 124M and Llama 1.1B and 8B."""
    yield "LayerNorm, 768", norm_launch(65536, 768, has_means=True)
    yield "RMSNorm, 2,048", norm_launch(16384, 2048, num_gradients=3)
    yield "RMSNorm, 4,096", norm_launch(8192, 4096, num_gradients=3)
    gelu: Any = backward_kernels.gelu_backward
    yield "GELU, 3,072", partial(gelu._init_fn, *[_tensor(65536, 3072, dtype=_BF16)] * 2)
    join: Any = backward_kernels.join_columns
    for title, dtype in (("one of q, k and v, 768", _BF16), ("cast, 768", _FP32)):
        yield title, partial(join._init_fn, [_tensor(65536, 768, dtype=dtype)], _BF16)
    for vocab_size in (50257, 32000, 128256):
        for is_chosen in (False, True):
            title = f"softmax{is_chosen * ' chosen for the card'}, {vocab_size:,}"
            yield title, partial(_launch_softmax, vocab_size, is_chosen)


def norm_launch(
    num_rows: int, width: int, *, has_means: bool = False, num_gradients: int = 1
) -> Callable[[], object]:
    """Return a function that launches `norm_backward` with a residual and a copy in bf16."""
    operation: Any = backward_kernels.norm_backward
    dtype = _FP32 if num_gradients == 1 else _BF16
    gradients = [_tensor(num_rows, width, dtype=dtype)] * num_gradients
    inputs, row_values = _tensor(num_rows, width), _tensor(num_rows, 1)
    means = row_values if has_means else None
    return partial(
        operation._init_fn, gradients, inputs, means, row_values, _tensor(width), inputs, _BF16
    )


def _launch_softmax(vocab_size: int, is_chosen: bool) -> None:
    columns = -(-vocab_size // 128) * 128
    softmax = choose_softmax(torch.device("cuda"), columns) if is_chosen else softmax_in_place
    labels = _tensor(8192, dtype=torch.int64)
    softmax(_tensor(8192, columns, dtype=_BF16), labels, vocab_size, True, 0.0)


def _tensor(*shape: int, dtype: torch.dtype = _FP32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")
