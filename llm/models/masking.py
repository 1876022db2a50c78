"""Causal masks of windows: over the whole window, or within each document only.

transformers detects several documents in one row by jumps in the position ids. `run_model` passes
the documents instead: this needs no synchronization with the device, and keeps positions and
attention independent.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, masking_utils

from llm.errors import ConfigError
from llm.runtime.float32 import full_float32

_LENGTH = 4  # per document in the check; every model has enough positions for two
_NEGLIGIBLE = 1e-3
"""Largest rounding error, relative to the effect of one document on the next without a mask."""


class _Answer:
    """The documents of the current forward pass."""

    documents: Tensor | None = None


_answer = _Answer()


def disable_packing_detection() -> None:
    """Let transformers take the documents of a window from `run_model`.

    By default, without an attention mask, it searches for jumps in the position ids and reads the
    result from the device. This costs a synchronization per micro-batch and, under torch.compile, a
    mask instead of the causal kernel.
    """
    if hasattr(masking_utils, "find_packed_sequence_indices"):
        masking_utils.find_packed_sequence_indices = lambda position_ids: _answer.documents


def run_model(
    model: torch.nn.Module,
    input_ids: Tensor,
    positions: Tensor | None,
    documents: Tensor | None,
    **kwargs: Any,
) -> Any:
    """Run a model's forward pass on windows without padding, so without an attention mask.

    Args:
        model: A causal language model, or its trunk.
        input_ids: [batch, length], int64.
        positions: [batch, length], int64; None: the model's default.
        documents: [batch, length], int64: number of each token's document; tokens do not attend to
            other documents. None: every token attends to all earlier ones.
        **kwargs: Further arguments of the forward pass.
    """
    if positions is not None:
        kwargs["position_ids"] = positions
    if documents is None:
        # Without documents, SDPA uses its causal kernel.
        return model(input_ids=input_ids, use_cache=False, **kwargs)
    with _answering(documents):
        return model(input_ids=input_ids, use_cache=False, **kwargs)


def documents_of_forward() -> Tensor | None:
    """Return the documents that `run_model` received for the current forward pass."""
    return _answer.documents


@contextmanager
def _answering(documents: Tensor) -> Iterator[None]:
    _answer.documents = documents
    try:
        yield
    finally:
        _answer.documents = None


@torch.no_grad()
@full_float32()
def check_documents_apart(model: PreTrainedModel, *, positions: bool, attention: bool) -> None:
    """Refuse a model that cannot keep the documents of a window apart.

    The check compares logits of windows with two documents, in evaluation mode.

    Args:
        model: A causal language model with weights; its mode is restored.
        positions: Whether positions start again with each document.
        attention: Whether attention stays within each document.

    Raises:
        ConfigError: The model or its attention kernel ignores one of the two.
    """
    kernel = str(getattr(model.config.get_text_config(), "_attn_implementation", None))
    name = f"{model.config.model_type} with the attention kernel {kernel}"
    if "flash" in kernel:
        raise ConfigError(
            "--reset_position_ids and --reset_attention_mask do not work with "
            f"--attention_implementation {kernel}; choose sdpa or eager."
        )
    training = model.training
    model.eval()
    try:
        logits = _logits_function(model)
        if attention and not _keeps_attention_apart(logits):
            raise ConfigError(
                f"--reset_attention_mask cannot keep documents apart in {name}: a document would "
                "see the text of the previous one; leave it out, or choose another architecture."
            )
        if positions and not _uses_positions(logits, together=attention):
            raise ConfigError(
                f"--reset_position_ids has no effect on {name}, which ignores position ids; leave "
                "it out."
            )
    finally:
        model.train(training)


@torch.no_grad()
def keeps_documents_apart(model: PreTrainedModel) -> bool:
    """Return whether attention never reaches another document of a window.

    Args:
        model: A causal language model with weights; its mode is restored.
    """
    training = model.training
    model.eval()
    try:
        return _keeps_attention_apart(_logits_function(model))
    finally:
        model.train(training)


_Logits = Callable[[list[str], bool, bool], Tensor]


def _logits_function(model: PreTrainedModel) -> _Logits:
    """Return a function that computes the last document's logits.

    Its arguments: names of the documents, and whether positions and attention keep them apart.
    """
    generator = torch.Generator().manual_seed(0)
    size = model.config.get_text_config().vocab_size
    tokens = {name: torch.randint(size, (1, _LENGTH), generator=generator) for name in "ABC"}

    def logits(names: list[str], positions: bool, attention: bool) -> Tensor:
        input_ids = torch.cat([tokens[name] for name in names], dim=1).to(model.device)
        indices = torch.arange(input_ids.shape[1], device=model.device).unsqueeze(0)
        outputs = run_model(
            model,
            input_ids,
            indices % _LENGTH if positions else None,
            indices // _LENGTH if attention else None,
        )
        last: Tensor = outputs.logits[:, -_LENGTH:].float()
        return last

    return logits


def _keeps_attention_apart(logits: _Logits) -> bool:
    """Return whether a document's logits do not depend on the previous document."""
    apart = _distance(logits(["A", "C"], False, True), logits(["B", "C"], False, True))
    mixed = _distance(logits(["A", "C"], False, False), logits(["B", "C"], False, False))
    return apart <= _NEGLIGIBLE * mixed


def _uses_positions(logits: _Logits, *, together: bool) -> bool:
    """Return whether the model uses the position ids.

    If attention is kept apart as well (`together`), a document must have the same logits as alone.
    """
    try:
        changed = not torch.equal(logits(["A", "C"], True, False), logits(["A", "C"], False, False))
    except TypeError:  # forward does not take position_ids
        return False
    if not changed or not together:
        return changed
    alone = logits(["C"], False, False)
    apart = _distance(logits(["A", "C"], True, True), alone)
    return apart <= _NEGLIGIBLE * _distance(logits(["A", "C"], False, False), alone)


def _distance(one: Tensor, other: Tensor) -> float:
    return float((one - other).abs().max())
