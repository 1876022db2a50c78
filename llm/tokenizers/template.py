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


def match_training(tokenizer: "PreTrainedTokenizerBase") -> None:
    """Let a tokenizer add to a text what training adds to the beginning of a document: nothing.

    Args:
        tokenizer: The tokenizer, which is changed. It saves the change, unless it is written in
            Python.
    """
    plain: list[int] = tokenizer.encode(_TEXT, add_special_tokens=False)
    templated: list[int] = tokenizer.encode(_TEXT)
    if templated == plain:
        return
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        tokenizer.build_inputs_with_special_tokens = lambda ids, pair=None: [*ids, *(pair or [])]
    else:
        from tokenizers.processors import TemplateProcessing

        backend.post_processor = TemplateProcessing(single="$A", pair="$A $B", special_tokens=[])
    added = tokenizer.convert_ids_to_tokens(sorted(set(templated) - set(plain)))
    logger.info(
        f"The tokenizer's template adds {', '.join(added)} to a text, and training texts have "
        "none of them: prompts, tasks and the exported tokenizer leave them out, too."
    )
