"""The tokens that a tokenizer's template puts around a text.

Training texts have none but those that the options ask for, whatever the template says. Prompts,
tasks and the exported tokenizer should add what the training texts have.
"""

import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_TEXT = "a"

logger = logging.getLogger("llm.tokenizers")


def match_training(tokenizer: "PreTrainedTokenizerBase", start: int | None) -> None:
    """Let a tokenizer add to a text what training adds to the beginning of a document.

    Args:
        tokenizer: The tokenizer, which is changed. It saves the change, unless it is written in
            Python.
        start: The token that begins each document; None if there is none.
    """
    plain: list[int] = tokenizer.encode(_TEXT, add_special_tokens=False)
    templated: list[int] = tokenizer.encode(_TEXT)
    starts = [] if start is None else [start]
    if templated == starts + plain:
        return
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        tokenizer.build_inputs_with_special_tokens = lambda ids, pair=None: [
            *starts,
            *ids,
            *(pair or []),
        ]
    else:
        from tokenizers.processors import TemplateProcessing

        names = tokenizer.convert_ids_to_tokens(starts)
        single, pair = ([*names, *texts] for texts in (["$A"], ["$A", "$B"]))
        tokens = list(zip(names, starts, strict=True))
        backend.post_processor = TemplateProcessing(single=single, pair=pair, special_tokens=tokens)
    former, current = (
        ", ".join(tokenizer.convert_ids_to_tokens(sorted(ids))) or "nothing"
        for ids in (set(templated) - set(plain), set(starts))
    )
    logger.info(
        f"The tokenizer's template adds {former} to a text. Training adds {current}, and so do "
        "prompts, tasks and the exported tokenizer."
    )
