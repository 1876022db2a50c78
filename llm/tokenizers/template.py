"""The tokens that a tokenizer's template puts around a text.

Training texts have none but those that the options ask for, whatever the template says. Prompts,
tasks and the exported tokenizer should add what the training texts have.
"""

import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_SAMPLE_TEXT = "a"

logger = logging.getLogger("llm.tokenizers")


def match_training_template(tokenizer: "PreTrainedTokenizerBase", begin_token: int | None) -> None:
    """Make a tokenizer's template add the tokens that training adds to a document's beginning.

    Args:
        tokenizer: The tokenizer, which is changed. It saves the change, unless it is written in
            Python.
        begin_token: Id of the token that begins each document; None if there is none.
    """
    plain_ids: list[int] = tokenizer.encode(_SAMPLE_TEXT, add_special_tokens=False)
    template_ids: list[int] = tokenizer.encode(_SAMPLE_TEXT)
    begin_ids = [] if begin_token is None else [begin_token]
    if template_ids == begin_ids + plain_ids:
        return
    _set_template(tokenizer, begin_ids)
    template_tokens = _name_tokens(tokenizer, set(template_ids) - set(plain_ids))
    training_tokens = _name_tokens(tokenizer, set(begin_ids))
    logger.info(
        f"The tokenizer's template adds {template_tokens} to a text. Training adds "
        f"{training_tokens}, and so do prompts, tasks and the exported tokenizer."
    )


def _set_template(tokenizer: "PreTrainedTokenizerBase", begin_ids: list[int]) -> None:
    """Make the template add these ids to the beginning of a text, or of a pair of texts."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:  # written in Python

        def build_inputs(ids: list[int], second_ids: list[int] | None = None) -> list[int]:
            return [*begin_ids, *ids, *(second_ids or [])]

        tokenizer.build_inputs_with_special_tokens = build_inputs
        return
    from tokenizers.processors import TemplateProcessing

    names = tokenizer.convert_ids_to_tokens(begin_ids)
    backend.post_processor = TemplateProcessing(
        single=[*names, "$A"],
        pair=[*names, "$A", "$B"],
        special_tokens=list(zip(names, begin_ids, strict=True)),
    )


def _name_tokens(tokenizer: "PreTrainedTokenizerBase", ids: set[int]) -> str:
    """Return the names of tokens, for the log."""
    return ", ".join(tokenizer.convert_ids_to_tokens(sorted(ids))) or "nothing"
