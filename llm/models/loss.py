"""The language-model loss, summed over tokens, without ever building the full logits."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from llm.models.cross_entropy import IGNORED, chunked_cross_entropy
from llm.models.masking import run_model
from llm.models.patches.tied_embedding import TiedEmbedding
from llm.models.plain_head import has_plain_head, hidden_states

_CHUNK_BYTES = {"cpu": 32 * 2**20}
ACCELERATOR_CHUNK_BYTES = 512 * 2**20
"""Memory for the fp32 logits of one chunk, but on a CPU."""
_MIN_ROWS = 64


class LanguageModelLoss(nn.Module):
    """A causal language model together with its loss: one forward, as data parallelism wants it.

    Args:
        model: A Hugging Face causal language model; it is not changed.
        vocab_size: Tokens that exist; rows of the output head beyond them are padding and take
            no part in the softmax. The size in the model's configuration unless given.
        chunked: Whether the logits are exactly `head(hidden states)`, so that the loss may be
            computed in chunks. Found out by `has_plain_head` unless given.
        chunk_bytes: Memory for the fp32 logits of one chunk. By device unless given.

    Attributes:
        chunked: Whether the loss is computed in chunks.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        vocab_size: int | None = None,
        chunked: bool | None = None,
        chunk_bytes: int | None = None,
    ) -> None:
        super().__init__()
        text_config = model.config.get_text_config()
        self.model = model
        self.vocab_size: int = text_config.vocab_size if vocab_size is None else vocab_size
        # The router's own loss needs the causal model's forward, and so the full logits.
        self._router = bool(getattr(text_config, "output_router_logits", False))
        self._router_coefficient = float(getattr(text_config, "router_aux_loss_coef", 0.0))
        if chunked is None:
            chunked = not self._router and has_plain_head(model)
        self.chunked = chunked
        self._chunk_bytes = chunk_bytes
        self._buffer: Tensor | None = None

    def forward(
        self,
        input_ids: Tensor,
        labels: Tensor,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The loss, summed over the tokens of a micro-batch.

        Args:
            input_ids: [batch, length], int64.
            labels: [batch, length], int64: the token that follows each input, -100 for none.
            positions: [batch, length], int64; None counts from 0 in each row.
            documents: [batch, length], int64: numbers of documents between which there shall be
                no attention; None lets each token see all that lie before it.

        Returns:
            Two fp32 scalars: what to differentiate, and the sum of the token losses for the
            log (detached). They differ only by a mixture-of-experts model's balancing loss,
            which enters once per token.
        """
        if self.chunked:
            loss_sum = self._chunked_loss(input_ids, labels, positions, documents)
            return loss_sum, loss_sum.detach()
        outputs = self._model_outputs(input_ids, positions, documents)
        logits = outputs.logits[..., : self.vocab_size].float()
        loss_sum = F.cross_entropy(
            logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum"
        )
        objective = loss_sum
        if self._router:
            tokens = (labels != IGNORED).sum()
            objective = loss_sum + self._router_coefficient * outputs.aux_loss * tokens
        return objective, loss_sum.detach()

    @torch.no_grad()
    def predictions(
        self,
        input_ids: Tensor,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
    ) -> Tensor:
        """The likeliest next token at each position.

        Args:
            input_ids: [batch, length], int64.
            positions: As for the loss.
            documents: As for the loss.

        Returns:
            [batch, length], int64.
        """
        if not self.chunked:
            logits: Tensor = self._model_outputs(input_ids, positions, documents).logits
            return logits[..., : self.vocab_size].argmax(dim=-1)
        hidden = hidden_states(self.model, input_ids, positions, documents).flatten(0, 1)
        head = self.model.get_output_embeddings()
        chunks = hidden.split(self._chunk_rows(hidden.device, head.weight.shape[0]))
        best = [head(chunk)[:, : self.vocab_size].argmax(dim=-1) for chunk in chunks]
        return torch.cat(best).view_as(input_ids)

    def _chunked_loss(
        self,
        input_ids: Tensor,
        labels: Tensor,
        positions: Tensor | None,
        documents: Tensor | None,
    ) -> Tensor:
        embedding = self.model.get_input_embeddings()
        tied = embedding if isinstance(embedding, TiedEmbedding) else None
        if tied is not None:
            tied.begin()
        hidden = hidden_states(self.model, input_ids, positions, documents).flatten(0, 1)
        if tied is not None and tied.lookups != 1:
            tied = None  # nobody, or nobody in particular, would end the head's gradient
        head = self.model.get_output_embeddings()
        rows = self._chunk_rows(hidden.device, head.weight.shape[0])
        return chunked_cross_entropy(
            hidden,
            head.weight,
            head.bias,
            labels.flatten(),
            vocab_size=self.vocab_size,
            rows=rows,
            tied=tied,
            buffer=self._logits_buffer(hidden, rows, head.weight),
        )

    def _model_outputs(
        self, input_ids: Tensor, positions: Tensor | None, documents: Tensor | None
    ) -> Any:
        kwargs = {"output_router_logits": True} if self._router else {}
        return run_model(self.model, input_ids, positions, documents, **kwargs)

    def _logits_buffer(self, hidden: Tensor, rows: int, weight: Tensor) -> Tensor | None:
        """[rows, columns]: memory for the logits of a chunk, on a CPU kept from step to step.

        The C library gives a block of this size back to the kernel, which clears it every time,
        or else lets it tear holes between the activations. A GPU's allocator does neither.
        """
        compiling = torch.compiler.is_compiling()
        sharded = isinstance(weight, DTensor)
        if hidden.device.type != "cpu" or torch.is_autocast_enabled("cpu") or compiling or sharded:
            return None
        shape = (min(rows, len(hidden)), len(weight))
        if (
            self._buffer is None
            or self._buffer.shape != shape
            or self._buffer.dtype != hidden.dtype
        ):
            self._buffer = torch.empty(shape, dtype=hidden.dtype)
        return self._buffer

    def _chunk_rows(self, device: torch.device, columns: int) -> int:
        size = self._chunk_bytes
        if size is None:
            size = _CHUNK_BYTES.get(device.type, ACCELERATOR_CHUNK_BYTES)
            return max(_MIN_ROWS, size // (4 * columns))
        return max(1, size // (4 * columns))
