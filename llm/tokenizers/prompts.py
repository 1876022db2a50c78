"""Token ids of a prompt or of a task's text."""

from typing import TYPE_CHECKING

from llm.errors import DataError, one_line

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def encode_prompt(
    tokenizer: "PreTrainedTokenizerBase", text: str, *, add_special_tokens: bool = True
) -> list[int]:
    """Return the token ids of a text, by default with the tokens of the tokenizer's template.

    Raises:
        DataError: The tokenizer fails on the text.
    """
    try:
        ids: list[int] = tokenizer.encode(text, add_special_tokens=add_special_tokens)
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:  # a panic of the library is not an `Exception`
        raise DataError(
            f"The tokenizer cannot encode the text that begins with {text[:60]!r}: "
            f"{one_line(error)[:120]}. Use another text, or another tokenizer."
        ) from error
    return ids
