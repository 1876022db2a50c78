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
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        tokenizer.build_inputs_with_special_tokens = lambda ids, pair=None: [
            *begin_ids,
            *ids,
            *(pair or []),
        ]
    else:
        from tokenizers.processors import TemplateProcessing

        names = tokenizer.convert_ids_to_tokens(begin_ids)
        single, pair = ([*names, *texts] for texts in (["$A"], ["$A", "$B"]))
        tokens = list(zip(names, begin_ids, strict=True))
        backend.post_processor = TemplateProcessing(single=single, pair=pair, special_tokens=tokens)
    template_tokens, training_tokens = (
        ", ".join(tokenizer.convert_ids_to_tokens(sorted(ids))) or "nothing"
        for ids in (set(template_ids) - set(plain_ids), set(begin_ids))
    )
    logger.info(
        f"The tokenizer's template adds {template_tokens} to a text. Training adds "
        f"{training_tokens}, and so do prompts, tasks and the exported tokenizer."
    )
