"""The language-model loss, summed over tokens, without full logits if the head allows it."""

import logging
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from llm.errors import ConfigError
from llm.models.attention import run_model
from llm.models.compilation import can_compile
from llm.models.cross_entropy import Softmax, chunked_cross_entropy
from llm.models.float8_head import SIZE_MULTIPLE
from llm.models.loss_chunks import TILE, LossChunks, default_chunks
from llm.models.options import ModelOptions
from llm.models.patches.tied_embedding import TiedEmbedding
from llm.models.sizes import find_blocks
from llm.runtime.float32 import sums_dtype
from llm.runtime.labels import IGNORED

_CPU_CHUNK_BYTES = 32 * 2**20
_CPU_MIN_ROWS = 64

logger = logging.getLogger("llm.models")


class LanguageModelLoss(nn.Module):
    """A causal language model and its loss in one module, so that data parallelism can wrap it.

    Args:
        model: A Hugging Face causal language model; not changed.
        is_chunked: Whether to compute the loss in chunks. The logits must then be exactly
            `head(hidden states)`. By default `has_plain_head` decides.
        chunks: The size of a chunk on an accelerator; by default for one of unknown memory.
        chunk_bytes: Memory for the fp32 logits of one chunk on a CPU.
        is_aligned: Whether matrix products have fast sizes for an accelerator: multiples of 128, in
            chunks of equal length. By default on all devices but a CPU.
        softmax: Computes the losses of a chunk and their gradient from its logits; by default by
            torch's operations.
        sources: Names of the sources for per-source sums; none without.
        z_loss: Coefficient of the z-loss, part of the objective in training mode.
        is_float8: Whether the head multiplies in float8 in training mode.

    Attributes:
        is_chunked: Whether the loss is computed in chunks.
        names: Names of the sums for the log: `loss`, and further ones. The log divides the sum NAME
            by the sum `#NAME`, or by the number of tokens if there is none.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        is_chunked: bool | None = None,
        chunks: LossChunks | None = None,
        chunk_bytes: int | None = None,
        is_aligned: bool | None = None,
        softmax: Softmax | None = None,
        sources: Sequence[str] = (),
        z_loss: float = 0.0,
        is_float8: bool = False,
    ) -> None:
        super().__init__()
        text_config = model.config.get_text_config()
        self.model = model
        # Further rows of the output head are padding, excluded from the softmax.
        self.vocab_size: int = text_config.vocab_size
        if is_chunked is None:
            is_chunked = has_plain_head(model)
        self.is_chunked = is_chunked
        self.head_loss = HeadLoss(model.get_output_embeddings()) if is_chunked else None
        self._chunks = chunks or default_chunks(None, None)
        self._chunk_bytes = chunk_bytes
        self._is_aligned = is_aligned
        self._softmax = softmax
        self._num_sources = len(sources)
        self._z_loss = z_loss
        self._is_float8 = is_float8
        names = ["loss", "z_loss"] if z_loss else ["loss"]
        for source in sources:
            names += [f"loss/{source}", f"#loss/{source}"]
        self.names: tuple[str, ...] = tuple(names)

    def forward(
        self,
        input_ids: Tensor,
        labels: Tensor,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
        sources: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the loss, summed over the tokens of a micro-batch.

        Args:
            input_ids: [batch, length], int64.
            labels: [batch, length], int64: the token after each input; -100 for no loss.
            positions: [batch, length], int64; None counts from 0 in each row.
            documents: [batch, length], int64: number of each token's document; tokens do not attend
                to other documents. None: every token attends to all earlier ones.
            sources: [batch], int64: number of the source of each sample.

        Returns:
            The objective to differentiate, an fp32 scalar: the sum of the token losses and the
            z-loss. And the sums for the log by `names`, detached, [len(names)], with the dtype of
            `zero_sums`.
        """
        needs_token_losses = sources is not None
        # Two paths: a term of the logits also belongs in `_ChunkedCrossEntropy` and the kernel.
        if self.head_loss is not None:
            loss_sum, z_sum, token_losses = self._compute_chunked_loss(
                self.head_loss, input_ids, labels, positions, documents, needs_token_losses
            )
        else:
            loss_sum, z_sum, token_losses = self._compute_full_loss(
                input_ids, labels, positions, documents, needs_token_losses
            )
        objective = loss_sum if z_sum is None else loss_sum + z_sum
        return objective, self._collect_metric_sums(loss_sum, z_sum, token_losses, labels, sources)

    def _compute_full_loss(
        self,
        input_ids: Tensor,
        labels: Tensor,
        positions: Tensor | None,
        documents: Tensor | None,
        needs_token_losses: bool,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return the sum of the cross-entropies, the z-loss, and the token losses, [tokens].

        The z-loss is None without one; token losses are None unless they are needed.
        """
        logits = run_model(self.model, input_ids, positions, documents).logits
        logits = logits[..., : self.vocab_size].float()
        losses = F.cross_entropy(
            logits.flatten(0, 1),
            labels.flatten(),
            ignore_index=IGNORED,
            reduction="none" if needs_token_losses else "sum",
        )
        z_sum = None
        if self._z_loss and self.training:
            squared_log_sums = logits.logsumexp(dim=-1).square()
            z_sum = self._z_loss * squared_log_sums.where(labels != IGNORED, 0.0).sum()
        if needs_token_losses:
            return losses.sum(), z_sum, losses
        return losses, z_sum, None

    @torch.no_grad()
    def _collect_metric_sums(
        self,
        loss_sum: Tensor,
        z_sum: Tensor | None,
        token_losses: Tensor | None,
        labels: Tensor,
        sources: Tensor | None,
    ) -> Tensor:
        """Return the sums for the log in the order of `names`, [len(names)]; missing ones are 0."""
        source_sums = None
        if token_losses is not None and sources is not None:
            source_sums = sum_losses_by_source(
                token_losses, labels, sources, num_sources=self._num_sources
            )
            loss_sum = source_sums[:, 0].sum()
        sums = [loss_sum.detach()]
        if self._z_loss:
            sums.append(torch.zeros_like(loss_sum) if z_sum is None else z_sum)
        # A single sum stays a view of the loss: torch.stack would start a kernel to copy it.
        leading_sums = sums[0].unsqueeze(0) if len(sums) == 1 else torch.stack(sums)
        if not self._num_sources:
            return leading_sums
        if source_sums is None:
            source_sums = self.zero_sums(labels.device)[len(sums) :]
        return torch.cat([leading_sums, source_sums.flatten()])

    def zero_sums(self, device: torch.device) -> Tensor:
        """Return zeros for the sums by `names`: fp32, or fp64 if some are of sources."""
        dtype = sums_dtype(device) if self._num_sources else torch.float32
        return torch.zeros(len(self.names), dtype=dtype, device=device)

    @torch.no_grad()
    def predict_tokens(
        self,
        input_ids: Tensor,
        labels: Tensor,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the likeliest next token at each position, and the label's log-probability.

        Takes the same arguments as `forward`.

        Returns:
            The likeliest tokens, int64 [batch, length]; and the log-probabilities of the labels in
            nats, fp32 [batch, length], 0 without a label.
        """
        if self.head_loss is not None:
            hidden = hidden_states(self.model, input_ids, positions, documents).flatten(0, 1)
            chunk_rows = self._choose_chunk_rows(hidden, self.head_loss.num_columns)
            predicted_ids, losses = self.head_loss.predict_tokens(
                hidden, labels.flatten(), vocab_size=self.vocab_size, chunk_rows=chunk_rows
            )
        else:
            logits = run_model(self.model, input_ids, positions, documents).logits.flatten(0, 1)
            predicted_ids, losses = _predict_tokens(logits[:, : self.vocab_size], labels.flatten())
        return predicted_ids.view_as(labels), -losses.view_as(labels)

    def _compute_chunked_loss(
        self,
        head_loss: "HeadLoss",
        input_ids: Tensor,
        labels: Tensor,
        positions: Tensor | None,
        documents: Tensor | None,
        needs_token_losses: bool,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Compute the loss without full logits; same results as `_compute_full_loss`."""
        embedding = self.model.get_input_embeddings()
        tied_embedding = embedding if isinstance(embedding, TiedEmbedding) else None
        if tied_embedding is not None:
            tied_embedding.start_forward()
        hidden = hidden_states(self.model, input_ids, positions, documents).flatten(0, 1)
        if tied_embedding is not None and tied_embedding.lookups != 1:
            tied_embedding = None  # exactly one lookup must complete the head's gradient
        chunk_rows = self._choose_chunk_rows(hidden, head_loss.num_columns)
        token_losses = None
        if needs_token_losses:
            token_losses = labels.new_empty(labels.numel(), dtype=torch.float32)
        loss_sum, z_sum = head_loss(
            hidden,
            labels.flatten(),
            vocab_size=self.vocab_size,
            chunk_rows=chunk_rows,
            column_multiple=TILE if self._has_aligned_products(hidden.device) else 1,
            tied_embedding=tied_embedding,
            softmax=self._softmax,
            token_losses=token_losses,
            z_loss=self._z_loss if self.training else 0.0,
            is_float8=self._is_float8 and self.training,
        )
        return loss_sum, z_sum, token_losses

    def _has_aligned_products(self, device: torch.device) -> bool:
        """Return whether matrix products have fast sizes for an accelerator."""
        return device.type != "cpu" if self._is_aligned is None else self._is_aligned

    def _choose_chunk_rows(self, hidden: Tensor, num_columns: int) -> int:
        """Return the tokens per chunk, for hidden states [tokens, width]."""
        if self._has_aligned_products(hidden.device):
            num_tokens, width = hidden.shape
            is_in_place = self._softmax is not None  # the kernel's gradient replaces the logits
            return self._chunks.choose_rows(num_tokens, num_columns, width, is_in_place=is_in_place)
        if self._chunk_bytes is None:
            return max(_CPU_MIN_ROWS, _CPU_CHUNK_BYTES // (4 * num_columns))
        return max(1, self._chunk_bytes // (4 * num_columns))


class HeadLoss(nn.Module):
    """The output head and its loss, in one module so that FSDP can gather the head for it."""

    def __init__(self, head: Any) -> None:
        super().__init__()
        self.head = head
        self._buffer: Tensor | None = None

    @property
    def num_columns(self) -> int:
        """Number of columns of the logits, including padding."""
        return int(self.head.weight.shape[0])

    def forward(
        self,
        hidden: Tensor,
        labels: Tensor,
        *,
        chunk_rows: int,
        column_multiple: int,
        **options: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Call `chunked_cross_entropy` for the head, with the same arguments and results."""
        weight, bias = self.head.weight, self.head.bias
        logits_buffer = None
        if column_multiple == 1:
            logits_buffer = self._get_logits_buffer(hidden, chunk_rows, weight)
        return chunked_cross_entropy(
            hidden,
            weight,
            bias,
            labels,
            chunk_rows=chunk_rows,
            column_multiple=column_multiple,
            logits_buffer=logits_buffer,
            **options,
        )

    def predict_tokens(
        self, hidden: Tensor, labels: Tensor, *, vocab_size: int, chunk_rows: int
    ) -> tuple[Tensor, Tensor]:
        """Return the likeliest tokens, int64 [tokens], and the losses of the labels, fp32 [tokens].

        Args:
            hidden: [tokens, width].
            labels: [tokens], int64; -100 for no loss.
            vocab_size: Columns of the vocabulary; the others are padding.
            chunk_rows: Tokens per chunk.
        """
        chunks = zip(hidden.split(chunk_rows), labels.split(chunk_rows), strict=True)
        chunk_results = [
            _predict_tokens(self.head(chunk_hidden)[:, :vocab_size], chunk_labels)
            for chunk_hidden, chunk_labels in chunks
        ]
        predicted_ids, losses = (torch.cat(results) for results in zip(*chunk_results, strict=True))
        return predicted_ids, losses

    def _get_logits_buffer(self, hidden: Tensor, chunk_rows: int, weight: Tensor) -> Tensor | None:
        """Return memory for the logits of a chunk, [rows, columns]; only on a CPU.

        All steps use the same memory: malloc would return a block of this size to the operating
        system, which clears it every time, or leave holes between the activations. A GPU's
        allocator does not have these problems.
        """
        is_compiling = torch.compiler.is_compiling()
        is_sharded = isinstance(weight, DTensor)
        if torch.is_autocast_enabled("cpu") or is_compiling or is_sharded:
            return None
        shape = (min(chunk_rows, len(hidden)), len(weight))
        buffer = self._buffer
        if buffer is None or buffer.shape != shape or buffer.dtype != hidden.dtype:
            buffer = self._buffer = torch.empty(shape, dtype=hidden.dtype)
        return buffer


def _predict_tokens(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return the likeliest tokens and the losses of the labels, [tokens] each."""
    losses = F.cross_entropy(logits.float(), labels, ignore_index=IGNORED, reduction="none")
    return logits.argmax(dim=-1), losses


def make_loss(
    options: ModelOptions,
    model: PreTrainedModel,
    *,
    device: torch.device,
    chunks: LossChunks | None,
    is_head_sharded: bool,
    is_float8: bool = False,
    sources: Sequence[str] = (),
) -> LanguageModelLoss:
    """Make the loss of a model, with a softmax and chunks that suit a device.

    Args:
        options: How the loss is computed, and its terms.
        model: The model.
        device: The device that it will be on.
        chunks: The size of a chunk on an accelerator; None for a CPU.
        is_head_sharded: Whether each rank has only some rows of the output head.
        is_float8: Whether the head multiplies in float8 in training mode.
        sources: Names of the sources for per-source sums.

    Raises:
        ConfigError: The head cannot multiply in float8.
    """
    if is_float8:
        _check_float8_head(model)
    softmax: Softmax | None = None
    # A sharded head uses torch's operations.
    if options.torch_compile and not is_head_sharded and can_compile(device):
        from llm.models.softmax_kernel import choose_softmax, softmax_in_place

        softmax = softmax_in_place
        if options.fused_kernels == "all":
            softmax = choose_softmax(device, model.config.get_text_config().vocab_size)
    return LanguageModelLoss(
        model,
        chunks=chunks,
        softmax=softmax,
        sources=sources,
        z_loss=options.z_loss,
        is_float8=is_float8,
    )


def _check_float8_head(model: PreTrainedModel) -> None:
    """Refuse a head that cannot multiply in float8."""
    head = model.get_output_embeddings()
    reason = None
    if not has_plain_head(model):
        reason = "changes its logits after the output head"
    elif head.bias is not None:
        reason = "has an output head with a bias"
    elif head.weight.shape[1] % SIZE_MULTIPLE:
        reason = f"has a width of {head.weight.shape[1]}, not a multiple of {SIZE_MULTIPLE}"
    if reason is not None:
        raise ConfigError(
            f"--fp8_head does not go with {model.config.model_type}, which {reason}; leave it out."
        )


@torch.no_grad()
def has_plain_head(model: PreTrainedModel) -> bool:
    """Return whether a model's logits are just the output head of its last hidden states.

    Some families scale or cap their logits, and their configurations have no common field for it.
    This function therefore compares the operations of the model with the operations of its base
    model and its head. Both run without blocks, because blocks may need real weights or a
    precision.

    Args:
        model: A causal language model, on the meta device or with weights; not changed.
    """
    head = model.get_output_embeddings()
    if type(head) is not nn.Linear or model.base_model is model:
        return False
    input_ids = torch.zeros((2, 8), dtype=torch.long, device=model.device)
    blocks = find_blocks(model)
    block_modules, blocks._modules = blocks._modules, {}
    try:
        with _OperationRecorder() as model_operations:
            run_model(model, input_ids, None, None)
        with _OperationRecorder() as head_operations:
            head(hidden_states(model, input_ids, None, None))
    except Exception:  # without its blocks, a model's code may raise anything
        logger.info(f"The loss of {type(model).__name__} is computed from the full logits.")
        return False
    finally:
        blocks._modules = block_modules
        torch.clear_autocast_cache()  # PyTorch 2.10 would reuse these casts without a gradient
    is_plain: bool = model_operations.calls == head_operations.calls
    return is_plain


class _OperationRecorder(TorchDispatchMode):
    """Records the operations that run inside the context, in order, and the shapes of results."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[tuple[str, torch.Size | None]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if not func.is_view and func.namespace != "prim":  # prim: such as a query for the device
            self.calls.append((str(func), getattr(result, "shape", None)))
        return result


def hidden_states(
    model: PreTrainedModel, input_ids: Tensor, positions: Tensor | None, documents: Tensor | None
) -> Tensor:
    """Return the input of the output head, [batch, length, width]; arguments as for `run_model`."""
    hidden: Tensor = run_model(model.base_model, input_ids, positions, documents)[0]
    return hidden


@torch.no_grad()
def sum_losses_by_source(
    token_losses: Tensor, labels: Tensor, sources: Tensor, *, num_sources: int
) -> Tensor:
    """Return the sum of the token losses of each source, and the number of its labels.

    Args:
        token_losses: [batch * length], fp32; 0 without a label.
        labels: [batch, length], int64; -100 for none.
        sources: [batch], int64: number of the source of each sample.
        num_sources: Number of sources.

    Returns:
        [num_sources, 2], of `sums_dtype`.
    """
    dtype = sums_dtype(labels.device)
    loss_sums = token_losses.view_as(labels).to(dtype).sum(1)
    label_counts = (labels != IGNORED).to(dtype).sum(1)
    # is_from_source: [batch, num_sources]. On a GPU, a scatter would add in varying order.
    is_from_source = sources.unsqueeze(1) == torch.arange(num_sources, device=labels.device)
    # Select instead of multiplying, so that an infinite loss or NaN stays with its source.
    source_sums = [
        torch.where(is_from_source, sample_sums.unsqueeze(1), 0.0).sum(0)
        for sample_sums in (loss_sums, label_counts)
    ]
    return torch.stack(source_sums, dim=1)
