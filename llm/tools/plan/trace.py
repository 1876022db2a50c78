"""Memory and arithmetic of a micro-batch, measured by running one block on fake tensors.

The model is the trainer's model with one block left. Its weights are fake tensors, which have
shapes but no memory. `MemoryMeter` counts the allocations of the forward and backward pass.
"""

import contextlib
import dataclasses
import gc
import weakref
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from llm.data.options import device_batch_size
from llm.errors import ConfigError, LLMError, one_line
from llm.models.loss import LanguageModelLoss
from llm.models.loss_chunks import default_chunks
from llm.models.mixtures import find_experts
from llm.models.sizes import find_blocks, head_width
from llm.tools.plan.options import PlanOptions


class Level(NamedTuple):
    """Bytes between two marks.

    Attributes:
        live: Allocated at the end.
        peak: Most bytes allocated at once.
        casts: The part of `live` that are copies of weights in another precision.
        compiled: The part of `live`, allocated since the last mark, that compiled code would keep.
    """

    live: int
    peak: int
    casts: int
    compiled: int


class MemoryMeter(TorchDispatchMode):
    """A mode that counts the storages of tensors returned by operations, until they are freed.

    Args:
        existing: Existing tensors, such as weights and inputs; they do not count.
    """

    def __init__(self, existing: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._existing = {tensor.untyped_storage()._cdata for tensor in existing}
        self._sizes: dict[int, int] = {}
        self._casts: set[int] = set()
        self._compiled_sizes: dict[int, int] = {}
        self._view_by_copy: dict[int, Any] = {}
        self._marked: set[int] = set()
        self._identity_by_source: dict[int, object] = {}
        self._live = self._peak = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation and count its results."""
        result = _run_operation(func, args, kwargs or {})
        is_copy = func is torch.ops.aten._to_copy.default
        is_cast = is_copy and args[0].untyped_storage()._cdata in self._existing
        for value in tree_leaves(result):
            if isinstance(value, Tensor):
                self._count_tensor(value, is_cast=is_cast)
        if is_copy:
            self._record_copy(args[0], result)
        for tensor, size in _tensors_for_compiled_code(func, args, result):
            key = tensor.untyped_storage()._cdata
            if key in self._sizes and key not in self._marked:
                self._compiled_sizes[key] = max(size, self._compiled_sizes.get(key, 0))
        return result

    def count_for_compiled_code(self, tensor: Tensor) -> None:
        """Count a tensor among those that compiled code keeps."""
        storage = tensor.untyped_storage()
        self._compiled_sizes[storage._cdata] = storage.nbytes()

    def mark(self) -> Level:
        """Return the level; the next peak counts from here."""
        casts = sum(self._sizes[key] for key in self._casts)
        # Autocast copies a tensor for each product; compiled code makes one copy for all.
        merged = {
            self._view_by_copy.get(key, key): size for key, size in self._compiled_sizes.items()
        }
        compiled = sum(merged.values())
        level = Level(live=self._live, peak=self._peak, casts=casts, compiled=compiled)
        self._peak, self._marked = self._live, set(self._sizes)
        self._compiled_sizes.clear()
        return level

    def _count_tensor(self, tensor: Tensor, *, is_cast: bool) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._existing or key in self._sizes:
            return
        self._sizes[key] = storage.nbytes()
        if is_cast:
            self._casts.add(key)
        self._live += self._sizes[key]
        self._peak = max(self._peak, self._live)
        weakref.finalize(storage, self._forget_storage, key)

    def _record_copy(self, tensor: Tensor, copy: Tensor) -> None:
        source = tensor.untyped_storage()._cdata
        if source in self._sizes:
            # The source may be freed before its copy, and a later storage may then get its key.
            identity = self._identity_by_source.setdefault(source, object())
            view = identity, copy.dtype, tensor.storage_offset(), tensor.shape, tensor.stride()
            self._view_by_copy[copy.untyped_storage()._cdata] = view

    def _forget_storage(self, key: int) -> None:
        self._live -= self._sizes.pop(key)
        for keys in (self._casts, self._marked):
            keys.discard(key)
        for value_by_key in (self._compiled_sizes, self._view_by_copy, self._identity_by_source):
            value_by_key.pop(key, None)


def _run_operation(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run an operation on tensors without data."""
    if func is not torch.ops.aten._grouped_mm.default:
        return func(*args, **kwargs)
    # For tensors without data, PyTorch has this product in bf16 only.
    lhs, rhs, *arguments = args
    result = func(lhs.to(torch.bfloat16), rhs.to(torch.bfloat16), *arguments, **kwargs)
    return result.to(lhs.dtype)


_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "_grouped_mm")
"""Operations that the compiler leaves to libraries."""


def _tensors_for_compiled_code(
    func: Any, args: tuple[Any, ...], result: Any
) -> list[tuple[Tensor, int]]:
    """Return the tensors of an operation that compiled code would keep, and their bytes.

    These are the operands and results of matrix products and attention, which are not fused with
    other operations, and the masks of dropout. Instead of the sum of two tensors it keeps the
    smaller one, such as a half-precision branch of the residual stream. The compiler chooses the
    smallest set of tensors from which it can recompute the others; this is nearly it.
    """
    operation = func._schema.name.removeprefix("aten::")
    if operation == "add" and all(isinstance(term, Tensor) for term in args[:2]):
        # A term that is broadcast, such as a bias, cannot replace the sum.
        terms = (term for term in args[:2] if term.numel() == result.numel())
        return [(result, min(term.nbytes for term in (result, *terms)))]
    operands_and_results: list[Any] = []
    if operation in _PRODUCTS or operation.startswith("_scaled_dot_product"):
        operands_and_results = [*tree_leaves(args), *tree_leaves(result)]
    elif operation == "native_dropout":
        _, mask = result
        operands_and_results = [mask]
    tensors = [value for value in operands_and_results if isinstance(value, Tensor)]
    return [(tensor, tensor.untyped_storage().nbytes()) for tensor in tensors]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trace:
    """One micro-batch on one rank: bytes, and FLOPs of matrix products.

    Attributes:
        inputs: Bytes kept by the layers before the blocks.
        block: Bytes that a block keeps until its backward pass, including its output.
        block_casts: The part of `block` for half-precision copies of weights, which autocast caches
            until the forward pass ends.
        backward_casts: The part of `block_casts` that the backward pass still needs.
        block_forward_extra: Temporary bytes of a block's forward pass.
        loss_extra: Peak of final norm and loss, forward and backward, above the level after the
            last block.
        backward_loss: The part of `loss_extra` that remains when the last block's backward pass
            begins, without the gradients of weights.
        retained_loss: The part of `backward_loss` that stays for the next step, on a CPU.
        block_backward_extra: Peak of a block's backward pass above its beginning, with the
            gradients of its weights.
        block_flops: Forward and backward of a block, including recomputation.
        loss_flops: Forward and backward of output head and loss.
        hidden: Bytes of the hidden states between two blocks.
        width: Width of the hidden states.
        key_width: Width of this rank's keys and values together.
        expert_rows: Rows that the block's experts compute: tokens times experts of a token; 0 for
            a dense block.
    """

    inputs: int
    block: int
    block_casts: int
    backward_casts: int
    block_forward_extra: int
    loss_extra: int
    backward_loss: int
    retained_loss: int
    block_backward_extra: int
    block_flops: float
    loss_flops: float
    hidden: int
    width: int
    key_width: int
    expert_rows: int


def trace(
    model: PreTrainedModel,
    options: PlanOptions,
    *,
    memory_bytes: int,
    length: int,
    tensor: int,
    context: int,
    is_compiled: bool,
) -> Trace:
    """Run one block of a model, with its loss, on fake tensors.

    Args:
        model: Model of one block on the meta device, in the shapes of one rank; changed in place.
        options: The run and its devices.
        memory_bytes: Memory of a device.
        length: Tokens of a sample.
        tensor: Size of tensor parallelism; the shapes are already divided by it.
        context: Size of context parallelism.
        is_compiled: Whether blocks are compiled. Temporary tensors of a block count as if it
            were not, which is more than its fused kernels need.

    Raises:
        ConfigError: The model reads values during its passes.
    """
    is_cpu = options.device == "cpu"  # dropout and attention keep more on a CPU
    if not is_cpu:
        _use_accelerator_kernels(model)
    # Activations of fp8 count as bf16's.
    dtype = torch.float16 if options.mixed_precision == "fp16" else torch.bfloat16
    autocast = torch.autocast("cpu", dtype, enabled=options.mixed_precision != "no")
    with FakeTensorMode(), _gather_keys(model, context):
        model._apply(lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu"))
        model.tie_weights()
        ids = torch.zeros(device_batch_size(options), length // context, dtype=torch.long)
        labels = torch.zeros_like(ids)
        meter = MemoryMeter([ids, labels, *model.parameters(), *model.buffers()])
        loss = _make_loss(model, options, memory_bytes=memory_bytes, tensor=tensor)
        recorder = _BlockRecorder(find_blocks(model)[0], meter)
        try:
            _run_micro_batch(loss, ids, labels, autocast, recorder)
        except LLMError:
            raise
        except Exception as error:  # such as shapes that depend on the tokens
            raise ConfigError(
                f"The {model.config.model_type} model cannot be planned, because its passes do not "
                f"run without data: {one_line(error)}."
            ) from error
    return _make_trace(recorder, model, tensor=tensor, is_compiled=is_compiled, is_cpu=is_cpu)


def _make_loss(
    model: PreTrainedModel, options: PlanOptions, *, memory_bytes: int, tensor: int
) -> LanguageModelLoss:
    """Make the loss as the trainer does on a device with this memory."""
    is_cpu = options.device == "cpu"
    has_kernel = options.torch_compile and options.device not in ("cpu", "pvc") and tensor == 1
    return LanguageModelLoss(
        model,
        is_chunked=True,
        chunks=default_chunks(memory_bytes, None),
        is_aligned=not is_cpu,
        softmax=_softmax_kernel if has_kernel else None,
    )


def _make_trace(
    recorder: "_BlockRecorder",
    model: PreTrainedModel,
    *,
    tensor: int,
    is_compiled: bool,
    is_cpu: bool,
) -> Trace:
    """Return the trace from the records of a forward and a backward pass."""
    gradient_bytes = sum(p.grad.nbytes for p in model.parameters() if p.grad is not None)
    head_bytes = sum(p.nbytes for p in model.get_output_embeddings().parameters())
    config = model.config.get_text_config()
    levels, flops = recorder.levels, recorder.flops
    block_start, block_end = levels["block"], levels["block done"]
    backward_start, backward_end = levels["backward"], levels["backward done"]

    block_bytes = block_end.live - block_start.live
    casts = block_end.casts - block_start.casts
    if is_compiled:  # it makes its copies of weights itself, and keeps what its backward pass needs
        block_bytes = block_end.compiled - casts + backward_start.casts
        casts = backward_start.casts
    forward_flops = flops["block done"] - flops["block"]
    return Trace(
        inputs=block_start.live,
        block=block_bytes,
        block_casts=casts,
        backward_casts=backward_start.casts,
        block_forward_extra=block_end.peak - block_end.live,
        loss_extra=max(levels["loss"].peak, backward_start.peak) - block_end.live,
        backward_loss=max(0, backward_start.live - block_end.live - head_bytes),
        retained_loss=max(0, levels["end"].live - gradient_bytes) if is_cpu else 0,
        block_backward_extra=backward_end.peak - backward_start.live,
        block_flops=forward_flops + flops["backward done"] - flops["backward"],
        loss_flops=flops["backward"] - flops["block done"],
        hidden=recorder.hidden_bytes,
        width=config.hidden_size,
        key_width=_key_width(config) // tensor,
        expert_rows=recorder.expert_rows,
    )


def _softmax_kernel(
    logits: Tensor, labels: Tensor, num_vocab_columns: int, needs_gradient: bool, z_loss: float
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return tensors in the shapes of the trainer's Triton kernel, which overwrites the logits."""
    losses = logits.new_empty(len(logits), dtype=torch.float32)
    squares = torch.empty_like(losses)
    return losses, squares if z_loss else None, logits if needs_gradient else None


def _run_micro_batch(
    loss: LanguageModelLoss,
    ids: Tensor,
    labels: Tensor,
    autocast: torch.autocast,
    recorder: "_BlockRecorder",
) -> None:
    """Run the forward and backward pass, and mark the levels after the loss and at the end."""
    with recorder.count_operations():
        with autocast:
            objective, _ = loss(ids, labels)
        recorder.mark("loss")
        objective.backward()
        del objective  # its graph holds the tensors that checkpointing has recomputed
        for _ in range(10):  # in cycles, which may take several rounds to free
            if not gc.collect():
                break
        recorder.mark("end")


def _key_width(config: PreTrainedConfig) -> int:
    """Return the width of a token's key and value together; 0 without attention, as in Mamba."""
    heads: int = getattr(config, "num_attention_heads", None) or 0
    key_heads: int = getattr(config, "num_key_value_heads", None) or heads
    return 2 * key_heads * head_width(config) if heads else 0


class _BlockRecorder:
    """Records memory and FLOPs at the ends of one block, forward and backward."""

    def __init__(self, block: nn.Module, meter: MemoryMeter) -> None:
        self._meter = meter
        self._counter = FlopCounterMode(display=False, custom_mapping=_FLOPS_BY_OPERATION)
        self.levels: dict[str, Level] = {}
        self.flops: dict[str, float] = {}
        self.hidden_bytes = 0
        self.expert_rows = 0
        for experts in find_experts(block).values():
            experts.register_forward_pre_hook(self._on_experts)
        # Recomputation calls these hooks again; the first call counts.
        block.register_forward_pre_hook(self._on_block_start, with_kwargs=True)
        block.register_forward_hook(self._on_block_end)

    @contextlib.contextmanager
    def count_operations(self) -> Iterator[None]:
        """Count FLOPs and memory inside the context, without Python's garbage collector."""
        # Python would collect the graph's cycles at unpredictable times and change the numbers.
        was_enabled = gc.isenabled()
        gc.disable()
        gc.freeze()  # later collections skip existing objects
        try:
            with self._counter, self._meter:
                yield
        finally:
            gc.unfreeze()
            if was_enabled:
                gc.enable()

    def mark(self, name: str) -> None:
        """Record the level of memory and the FLOPs so far; the first mark of a name counts."""
        if name not in self.levels:
            self.levels[name] = self._meter.mark()
            self.flops[name] = float(self._counter.get_total_flops())

    def _on_block_start(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if "block" not in self.levels:
            hidden = args[0] if args else kwargs["hidden_states"]
            self.hidden_bytes = hidden.nbytes
            hidden.register_hook(lambda _: self.mark("backward done"))
            self.mark("block")

    def _on_experts(self, _: nn.Module, args: tuple[Any, ...]) -> None:
        self.expert_rows = args[1].numel()

    def _on_block_end(self, _: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if "block done" not in self.levels:
            output = output[0] if isinstance(output, tuple) else output
            output.register_hook(lambda _: self.mark("backward"))
            self._meter.count_for_compiled_code(output)
            self.mark("block done")


def _grouped_product_flops(left: torch.Size, right: torch.Size) -> int:
    """Return the operations of a product whose groups of rows or columns are other matrices."""
    flops = 2 * left.numel() * right[-1]
    # A stack times one matrix: each matrix of the stack multiplies a part of the columns.
    return flops // left[0] if len(left) > len(right) else flops


def _attention_flops(query: torch.Size, key: torch.Size, value: torch.Size) -> int:
    """Return the operations of two matrix products. Keys and values may have fewer heads."""
    batch, heads, length, width = query
    return 2 * batch * heads * length * key[2] * (width + value[3])


_FLOPS_BY_OPERATION = {
    # torch's table lacks these.
    torch.ops.aten._grouped_mm: (
        lambda left, right, *args, out_shape=None, **kwargs: _grouped_product_flops(left, right)
    ),
    # Products are counted in full, as if attention were not causal; the scores recomputed by the
    # backward kernel are not counted.
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: (
        lambda query, key, value, *args, out_shape=None, **kwargs: _attention_flops(
            query, key, value
        )
    ),
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: (
        lambda grad, query, key, value, *args, out_shape=None, **kwargs: (
            2 * _attention_flops(query, key, value)
        )
    ),
}


class _MaskedDropout(nn.Dropout):
    """A dropout that keeps its mask in one byte per element, as on a GPU."""

    def forward(self, input: Tensor) -> Tensor:
        output: Tensor = torch.native_dropout(input, self.p, self.training)[0]
        return output


def _use_accelerator_kernels(model: PreTrainedModel) -> None:
    """Let the model keep the same tensors as on a GPU: no attention scores, small dropout masks."""
    for module in model.modules():
        if type(module) is nn.Dropout:
            module.__class__ = _MaskedDropout
        if type(getattr(module, "attention_dropout", None)) is float:
            module.attention_dropout = 0.0  # the kernel draws the mask and keeps no scores
    for name, module in model.named_modules():
        if isinstance(module, nn.Dropout) and "attn_dropout" in name:
            module.p = 0.0


@contextlib.contextmanager
def _gather_keys(model: PreTrainedModel, context: int) -> Iterator[None]:
    """Repeat keys and values `context` times for attention, as if ranks had gathered them."""
    if context == 1:
        yield
        return

    def attend_to_gathered_keys(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        key, value = (torch.cat([tensor] * context, dim=2) for tensor in (key, value))
        sdpa = ALL_ATTENTION_FUNCTIONS["sdpa"]
        return sdpa(module, query, key, value, None, **{**kwargs, "is_causal": False})

    name = "llm_plan_gathered"
    ALL_ATTENTION_FUNCTIONS.register(name, attend_to_gathered_keys)
    model.config.get_text_config()._attn_implementation = name
    yield
