"""The code that torch.compile generates for a GPU, on a machine without one.

PyTorch without CUDA cannot run autograd on CUDA tensors, so a module is traced with fake tensors on
the CPU. The forward and the backward graph are then moved to a made-up H100, for which Inductor
plans its kernels, counts the bytes that each reads and writes, and writes their code. Nothing is
compiled further or run.
"""

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch._dynamo
import torch._inductor.config as inductor
from torch import Tensor, nn
from torch._dynamo.device_interface import CudaInterface
from torch._inductor import compile_fx, scheduler
from torch._inductor.fx_passes import reinplace
from torch._inductor.graph import GraphLowering
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import GraphModule
from torch.utils._pytree import tree_map, tree_map_only

H100 = SimpleNamespace(
    name="made-up H100",
    major=9,
    minor=0,
    multi_processor_count=132,
    total_memory=80 * 2**30,
    regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    warp_size=32,
    shared_memory_per_block=49152,
    shared_memory_per_block_optin=232448,
    shared_memory_per_multiprocessor=233472,
    L2_cache_size=50 * 2**20,
    gcnArchName="",
)
_GPU = torch.device("cuda", 0)
_LIBRARY_KERNELS = ("mm", "scaled_dot_product")
"""Parts of the names of matrix products and attention."""


@dataclass(frozen=True)
class GeneratedKernel:
    """A kernel of a compiled graph.

    Attributes:
        is_backward: Whether it belongs to the backward pass.
        is_library: Whether it is a matrix product or attention.
        num_bytes: Bytes that it reads and writes at least, each tensor once.
        operations: Names of the operations that it computes.
    """

    is_backward: bool
    is_library: bool
    num_bytes: int
    operations: tuple[str, ...]


def generate_kernels(
    module: nn.Module,
    inputs: Callable[[], tuple[Tensor, Mapping[str, Any]]],
    options: Mapping[str, Any],
) -> list[GeneratedKernel]:
    """Return the kernels of a forward and a backward pass under autocast to bf16.

    Args:
        module: A module on the meta device, whose first result is differentiated.
        inputs: Makes the first argument of the module, and further ones; fp32.
        options: Options of torch.compile.
    """
    torch._dynamo.reset()
    kernels: list[GeneratedKernel] = []

    def compile_graph(graph: GraphModule, example_inputs: Sequence[Any]) -> Any:
        inner_compile = _GraphCapture(kernels)
        return compile_fx.compile_fx(graph, example_inputs, inner_compile=inner_compile)

    settings = {"fx_graph_cache": False, "compile_threads": 1, **options}
    with FakeTensorMode(), inductor.patch(settings):
        module._apply(lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu"))
        compiled = torch.compile(module, backend=compile_graph, dynamic=False, fullgraph=True)
        first_input, further_inputs = inputs()
        with torch.autocast("cpu", torch.bfloat16):
            output = compiled(first_input.requires_grad_(), **further_inputs)
        output = output[0] if isinstance(output, tuple) else output
        output.sum().backward()
    return kernels


class _CapturedCode(Exception):
    """Ends the compilation of a graph when its code is written."""


class _GraphCapture:
    """Inductor's compiler of one graph, which moves the graph to the made-up GPU."""

    def __init__(self, kernels: list[GeneratedKernel]) -> None:
        self._kernels = kernels

    def __call__(self, graph: GraphModule, example_inputs: Sequence[Any], **options: Any) -> Any:
        is_backward = bool(options.get("is_backward"))
        gpu_graph = copy.deepcopy(graph)

        def record(lowering: GraphLowering) -> None:
            with mock.patch("torch._inductor.codecache.PyCodeCache"):
                lowering.codegen()
            nodes = lowering.scheduler.nodes
            self._kernels.extend(_describe_kernel(node, is_backward) for node in nodes)
            raise _CapturedCode

        with made_up_gpu(), mock.patch.object(GraphLowering, "_compile_to_module", record):
            try:
                compile_fx.compile_fx_inner(
                    gpu_graph, _move_to_gpu(gpu_graph, example_inputs), **options
                )
            except Exception as error:
                if not _is_caused_by_capture(error):
                    raise

        def run_on_fake_tensors(arguments: list[Any]) -> Any:
            return graph(*arguments)

        run_on_fake_tensors._boxed_call = True  # type: ignore[attr-defined]
        return run_on_fake_tensors


def _is_caused_by_capture(error: BaseException | None) -> bool:
    while error is not None and not isinstance(error, _CapturedCode):
        error = getattr(error, "inner_exception", None) or error.__cause__ or error.__context__
    return error is not None


def _describe_kernel(node: Any, is_backward: bool) -> GeneratedKernel:
    parts = [part.node for part in node.get_nodes() if part.node is not None]
    names = [str(getattr(part, "python_kernel_name", "")) for part in parts]
    origins = {origin for part in parts for origin in part.get_origins()}
    return GeneratedKernel(
        is_backward=is_backward,
        is_library=any(library in name for name in names for library in _LIBRARY_KERNELS),
        num_bytes=node.get_read_write_buffers_sizes(),
        operations=tuple(sorted({str(origin.target) for origin in origins})),
    )


def _move_to_gpu(graph: GraphModule, example_inputs: Sequence[Any]) -> list[Any]:
    """Move a graph of fake tensors to the GPU, in place; return inputs for it."""

    def move(value: Any) -> Any:
        if not isinstance(value, FakeTensor):
            return value
        with torch.no_grad(), value.fake_mode:
            return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=_GPU)

    for node in graph.graph.nodes:
        node.args = tree_map_only(torch.device, lambda _: _GPU, node.args)
        node.kwargs = tree_map_only(torch.device, lambda _: _GPU, node.kwargs)
        for name in ("val", "eager_input_vals"):
            if name in node.meta:
                node.meta[name] = tree_map(move, node.meta[name])
    graph.recompile()
    return [move(value) for value in example_inputs]


@contextlib.contextmanager
def made_up_gpu() -> Iterator[None]:
    """Let PyTorch and Triton take the machine for one with an H100."""
    import triton
    from triton.backends.compiler import GPUTarget

    driver = mock.MagicMock()
    driver.get_current_target.return_value = GPUTarget("cuda", 90, 32)
    capability = H100.major, H100.minor
    functions: dict[str, Callable[..., Any]] = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "get_device_properties": lambda *_: H100,
        "get_device_capability": lambda *_: capability,
        "is_bf16_supported": lambda *_: True,
        "get_rng_state": lambda *_: torch.zeros(16, dtype=torch.uint8),
        "set_rng_state": lambda *_: None,
        "_exchange_device": lambda _: 0,
        "_maybe_exchange_device": lambda _: 0,
    }
    interface: dict[str, Callable[..., Any]] = {
        "get_device_properties": lambda *_: H100,
        "current_device": lambda: 0,
        "device_count": lambda: 1,
        "get_compute_capability": lambda *_: 90,
        "get_raw_stream": lambda _: 0,
    }
    with contextlib.ExitStack() as stack:
        for name, function in functions.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, function))
        for name, function in interface.items():
            stack.enter_context(mock.patch.object(CudaInterface, name, staticmethod(function)))
        worker_properties = mock.patch.object(
            CudaInterface.Worker, "get_device_properties", return_value=H100
        )
        stack.enter_context(worker_properties)
        stack.enter_context(mock.patch.object(scheduler, "has_triton", return_value=True))
        stack.enter_context(mock.patch.object(triton.runtime.driver, "_active", driver))
        # It asks for the driver, where PyTorch is built with CUDA.
        stack.enter_context(mock.patch.object(fake_tensor, "init_gpu_context"))
        # It copies into a tensor, which fake tensors on a GPU refuse without CUDA.
        stack.enter_context(
            mock.patch.object(reinplace, "_inplace_generalized_scatter", lambda values, *_: values)
        )
        yield
