"""Which tokens of a window see one another: all that lie before, or those of their document only.

transformers looks for several documents in one row by jumps in the position ids. We answer in its
place, because we know: this costs no stop of the device, and keeps positions and attention apart.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, masking_utils

from llm.errors import ConfigError

_LENGTH = 4  # of the two documents of the check; any model has so many positions twice
_NEGLIGIBLE = 1e-3
"""Rounding, as a share of what one document does to another where nothing keeps them apart."""


class _Answer:
    """What transformers is told about the forward that is under way."""

    documents: Tensor | None = None


_answer = _Answer()


def disable_packing_detection() -> None:
    """Tell transformers which documents a window holds: none, unless `run_model` was given some.

    Without an attention mask it looks for jumps in the position ids and reads the answer
    back from the device: one stop of the device for each micro-batch, and under
    torch.compile a mask in place of the causal kernel.
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
    """A model's forward over windows that have no padding, and so need no attention mask.

    Args:
        model: A causal language model, or its trunk.
        input_ids: [batch, length], int64.
        positions: [batch, length], int64; None leaves them to the model.
        documents: [batch, length], int64: numbers of documents between which there shall be no
            attention; None lets each token see all that lie before it.
        **kwargs: More arguments of the forward.
    """
    if positions is not None:
        kwargs["position_ids"] = positions
    if documents is None:
        # SDPA then takes its causal kernel.
        return model(input_ids=input_ids, use_cache=False, **kwargs)
    with _answering(documents):
        return model(input_ids=input_ids, use_cache=False, **kwargs)


def documents_of_forward() -> Tensor | None:
    """The documents that `run_model` was given for the forward that is under way."""
    return _answer.documents


@contextmanager
def _answering(documents: Tensor) -> Iterator[None]:
    _answer.documents = documents
    try:
        yield
    finally:
        _answer.documents = None


@torch.no_grad()
def check_documents_apart(model: PreTrainedModel, *, positions: bool, attention: bool) -> None:
    """Refuse a model that cannot keep the documents of a window apart as asked.

    The model is asked by what it does: two documents in one window, in evaluation mode.

    Args:
        model: A causal language model with weights; its mode is restored.
        positions: Whether positions shall start again with each document.
        attention: Whether there shall be no attention between documents.

    Raises:
        ConfigError: It ignores one of the two, or its attention kernel would.
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
        logits = _asker(model)
        if attention and not _keeps_attention_apart(logits):
            raise ConfigError(
                f"--reset_attention_mask cannot keep documents apart in {name}: what one document "
                "says would reach the next one; leave it out, or choose another architecture."
            )
        if positions and not _uses_positions(logits, together=attention):
            raise ConfigError(
                f"--reset_position_ids has no effect on {name}, which does not take positions "
                "from outside; leave it out."
            )
    finally:
        model.train(training)


_Ask = Callable[[list[str], bool, bool], Tensor]


def _asker(model: PreTrainedModel) -> _Ask:
    """A function from documents by name, and what to keep apart, to the last one's logits."""
    generator = torch.Generator().manual_seed(0)
    size = model.config.get_text_config().vocab_size
    tokens = {name: torch.randint(size, (1, _LENGTH), generator=generator) for name in "ABC"}

    def logits(names: list[str], positions: bool, attention: bool) -> Tensor:
        input_ids = torch.cat([tokens[name] for name in names], dim=1).to(model.device)
        places = torch.arange(input_ids.shape[1], device=model.device).unsqueeze(0)
        outputs = run_model(
            model,
            input_ids,
            places % _LENGTH if positions else None,
            places // _LENGTH if attention else None,
        )
        last: Tensor = outputs.logits[:, -_LENGTH:].float()
        return last

    return logits


def _keeps_attention_apart(logits: _Ask) -> bool:
    """Whether a document's logits are the same after any other one."""
    apart = _distance(logits(["A", "C"], False, True), logits(["B", "C"], False, True))
    mixed = _distance(logits(["A", "C"], False, False), logits(["B", "C"], False, False))
    return apart <= _NEGLIGIBLE * mixed


def _uses_positions(logits: _Ask, *, together: bool) -> bool:
    """Whether positions matter and, with attention kept apart too, a document is as if alone."""
    try:
        changed = not torch.equal(logits(["A", "C"], True, False), logits(["A", "C"], False, False))
    except TypeError:  # the forward has no such argument
        return False
    if not changed or not together:
        return changed
    alone = logits(["C"], False, False)
    apart = _distance(logits(["A", "C"], True, True), alone)
    return apart <= _NEGLIGIBLE * _distance(logits(["A", "C"], False, False), alone)


def _distance(one: Tensor, other: Tensor) -> float:
    return float((one - other).abs().max())
