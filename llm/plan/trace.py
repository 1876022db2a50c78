"""A micro-batch's memory and arithmetic, found by running one block on fake tensors.

The model is the trainer's own, with all but one of its blocks taken out and its weights replaced
by fake tensors, which have shapes and no memory; its forward and backward passes run as they
would, and a meter counts what they allocate.
"""

import contextlib
import dataclasses
import gc
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from llm.models.loss import ACCELERATOR_CHUNK_BYTES, LanguageModelLoss
from llm.models.sizes import find_blocks
from llm.plan.meter import Level, MemoryMeter
from llm.plan.options import PlanOptions


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trace:
    """One micro-batch on one rank: bytes, and FLOPs of matrix products.

    Attributes:
        inputs: Bytes kept by what lies before the blocks.
        block: Bytes that a block keeps until its backward pass, its output included.
        block_casts: Of these, copies of weights in half precision, while autocast keeps them: to
            the end of the forward pass.
        casts_left: What of these its backward pass needs still.
        block_forward_extra: What its forward pass takes for a while above what it keeps.
        loss_extra: What final norm and loss take at most, forward and backward, above what the
            last block left.
        loss_left: What of that is left when the last block's backward pass begins, without the
            gradients of weights.
        loss_kept: What of that stays for the next step, on a CPU.
        block_backward_extra: What a block's backward pass takes at most above its beginning, with
            the gradients of its weights.
        block_flops: Forward and backward of a block, with recomputation if there is any.
        loss_flops: Forward and backward of output head and loss.
        hidden: Bytes of the hidden states that one block hands to the next.
        width: Width of the hidden states.
        key_width: Width of this rank's keys and values together.
    """

    inputs: int
    block: int
    block_casts: int
    casts_left: int
    block_forward_extra: int
    loss_extra: int
    loss_left: int
    loss_kept: int
    block_backward_extra: int
    block_flops: float
    loss_flops: float
    hidden: int
    width: int
    key_width: int


def trace(
    model: PreTrainedModel, options: PlanOptions, *, length: int, tensor: int, context: int
) -> Trace:
    """Run one block of a model, with its loss, on fake tensors.

    Args:
        model: One of one block on the meta device with the shapes of one rank; it is used up.
        options: What is planned.
        length: Tokens of a sample.
        tensor: Ranks that each compute a part of every layer; the shapes are one's already.
        context: Ranks that each hold a part of every sample.
    """
    on_host = options.device == "cpu"  # whose dropout and attention keep more
    if not on_host:
        _use_accelerator_kernels(model)
    # Activations of fp8 count as bf16's.
    dtype = torch.float16 if options.mixed_precision == "fp16" else torch.bfloat16
    with FakeTensorMode(), _gathered_keys(model, context):
        model._apply(lambda t: torch.empty(t.shape, dtype=t.dtype, device="cpu"))
        model.tie_weights()
        chunk_bytes = None if on_host else ACCELERATOR_CHUNK_BYTES
        loss = LanguageModelLoss(model, chunked=options.chunked_loss, chunk_bytes=chunk_bytes)
        samples = options.per_device_train_batch_size
        ids = torch.zeros(samples, length // context, dtype=torch.long)
        labels = torch.zeros_like(ids)
        known = [ids, labels, *model.parameters(), *model.buffers()]
        marks = _Marks(find_blocks(model)[0], MemoryMeter(known))
        with marks.counting():
            with torch.autocast("cpu", dtype, enabled=options.mixed_precision != "no"):
                objective, _ = loss(ids, labels)
            marks.mark("loss")
            objective.backward()
            del objective  # its graph holds what checkpointing has recomputed
            for _ in range(10):  # in cycles, the last of which take several rounds
                if not gc.collect():
                    break
            marks.mark("end")
        gradients = sum(p.grad.nbytes for p in model.parameters() if p.grad is not None)
        head = sum(p.nbytes for p in model.get_output_embeddings().parameters())
    config = model.config.get_text_config()
    level, flops = marks.levels, marks.flops
    before, after = level["block"], level["block done"]
    forward_flops = flops["block done"] - flops["block"]
    return Trace(
        inputs=before.live,
        block=after.live - before.live,
        block_casts=after.casts - before.casts,
        casts_left=level["backward"].casts,
        block_forward_extra=after.peak - after.live,
        loss_extra=max(level["loss"].peak, level["backward"].peak) - after.live,
        loss_left=max(0, level["backward"].live - after.live - head),
        loss_kept=max(0, level["end"].live - gradients) if on_host else 0,
        block_backward_extra=level["backward done"].peak - level["backward"].live,
        block_flops=forward_flops + flops["backward done"] - flops["backward"],
        loss_flops=flops["backward"] - flops["block done"],
        hidden=marks.hidden,
        width=config.hidden_size,
        key_width=_key_width(config) // tensor,
    )


def _key_width(config: PreTrainedConfig) -> int:
    """Numbers that a token's key and value are."""
    heads: int = config.num_attention_heads
    key_heads: int = getattr(config, "num_key_value_heads", None) or heads
    head_width: int = getattr(config, "head_dim", None) or config.hidden_size // heads
    return 2 * key_heads * head_width


class _Marks:
    """Memory and FLOPs at the borders of one block, forward and backward."""

    def __init__(self, block: nn.Module, meter: MemoryMeter) -> None:
        self._meter = meter
        self._counter = FlopCounterMode(display=False, custom_mapping=_ATTENTION_FLOPS)
        self.levels: dict[str, Level] = {}
        self.flops: dict[str, float] = {}
        self.hidden = 0
        # A recomputed block passes its borders twice; the first time counts.
        block.register_forward_pre_hook(self._enter, with_kwargs=True)
        block.register_forward_hook(self._leave)

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        # Python collects the graph's cycles at unpredictable times, which would change the numbers.
        was_enabled = gc.isenabled()
        gc.disable()
        gc.freeze()  # what is there already is not looked through at every collection
        try:
            with self._counter, self._meter:
                yield
        finally:
            gc.unfreeze()
            if was_enabled:
                gc.enable()

    def mark(self, name: str) -> None:
        if name not in self.levels:
            self.levels[name] = self._meter.mark()
            self.flops[name] = float(self._counter.get_total_flops())

    def _enter(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if "block" not in self.levels:
            hidden = args[0] if args else kwargs["hidden_states"]
            self.hidden = hidden.nbytes
            hidden.register_hook(lambda _: self.mark("backward done"))
            self.mark("block")

    def _leave(self, _: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if "block done" not in self.levels:
            output = output[0] if isinstance(output, tuple) else output
            output.register_hook(lambda _: self.mark("backward"))
            self.mark("block done")


_ATTENTION_FLOPS = {
    # Missing in torch's own table. Products are counted in full, as if not causal, and not the
    # scores that the backward kernel computes once more.
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: (
        lambda query, key, value, *args, out_shape=None, **kwargs: sdpa_flop_count(
            query, key, value
        )
    ),
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: (
        lambda grad, query, key, value, *args, out_shape=None, **kwargs: (
            2 * sdpa_flop_count(query, key, value)
        )
    ),
}


class _MaskedDropout(nn.Dropout):
    """Dropout that keeps its mask in a byte for each element, as on a GPU."""

    def forward(self, input: Tensor) -> Tensor:
        kept: Tensor = torch.native_dropout(input, self.p, self.training)[0]
        return kept


def _use_accelerator_kernels(model: PreTrainedModel) -> None:
    """Trace what a GPU would keep: no attention scores, small dropout masks."""
    for module in model.modules():
        if type(module) is nn.Dropout:
            module.__class__ = _MaskedDropout
        if type(getattr(module, "attention_dropout", None)) is float:
            module.attention_dropout = 0.0  # drawn inside the kernel, which keeps no scores
    for name, module in model.named_modules():
        if isinstance(module, nn.Dropout) and "attn_dropout" in name:
            module.p = 0.0


@contextlib.contextmanager
def _gathered_keys(model: PreTrainedModel, context: int) -> Iterator[None]:
    """Let attention see the keys and values of all parts of a sample, as if gathered."""
    if context == 1:
        yield
        return

    def attention(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        key, value = (torch.cat([part] * context, dim=2) for part in (key, value))
        sdpa = ALL_ATTENTION_FUNCTIONS["sdpa"]
        return sdpa(module, query, key, value, None, **{**kwargs, "is_causal": False})

    name = "llm_plan_gathered"
    ALL_ATTENTION_FUNCTIONS.register(name, attention)
    model.config.get_text_config()._attn_implementation = name
    yield
