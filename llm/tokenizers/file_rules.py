"""Tokenizers that encode by the rules of their `tokenizer.json`, whatever class names them.

Some classes of transformers take only the vocabulary of the file, and bring their own normalizer,
pre-tokenizer and special tokens. `tokenizer_config.json`, or the model's type in a `config.json`
next to it, chooses the class.
"""

import json
import logging
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

_PARTS_WITHOUT_EFFECT_ON_IDS = ("version", "truncation", "padding", "post_processor", "decoder")
"""Parts of a tokenizer.json that change no id of a text."""

logger = logging.getLogger("llm.tokenizers")


def restore_file_rules(
    tokenizer: "PreTrainedTokenizerBase", name: str
) -> "PreTrainedTokenizerBase":
    """Return a tokenizer that gives the ids of `tokenizer.json`.

    Args:
        tokenizer: The tokenizer that `AutoTokenizer` has loaded.
        name: The folder or Hub name that it was loaded from; its files are in the Hub's cache.

    Returns:
        The same tokenizer if it has the rules of the file, if the file does not exist, or if the
        tokenizer is written in Python or comes with its code. Otherwise a
        `PreTrainedTokenizerFast` with the special tokens of the first.
    """
    from transformers import PreTrainedTokenizerFast

    backend = getattr(tokenizer, "backend_tokenizer", None)
    is_library_class = type(tokenizer).__module__.startswith("transformers.")
    if backend is None or not is_library_class or type(tokenizer) is PreTrainedTokenizerFast:
        return tokenizer
    generic_tokenizer = _load_if_rules_differ(name, backend)
    if generic_tokenizer is None:
        return tokenizer
    _add_special_tokens(generic_tokenizer, tokenizer)
    logger.info(
        f"The tokenizer {name} has the rules of its tokenizer.json. transformers' class "
        f"{type(tokenizer).__name__} would replace some of them and could give other ids."
    )
    return generic_tokenizer


def _load_if_rules_differ(
    name: str, class_backend: "Tokenizer"
) -> "PreTrainedTokenizerBase | None":
    """Load the generic tokenizer of a `tokenizer.json` if a class has replaced rules of it."""
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    tokenizer_json = _find_tokenizer_json(name)
    if tokenizer_json is None:
        return None
    class_rules = _id_rules(class_backend)
    # Most classes keep the rules. The generic tokenizer would read all files again.
    if _id_rules(Tokenizer.from_file(tokenizer_json)) == class_rules:
        return None
    tokenizer: PreTrainedTokenizerBase = PreTrainedTokenizerFast.from_pretrained(
        name, local_files_only=True
    )
    return None if _id_rules(tokenizer.backend_tokenizer) == class_rules else tokenizer


def _add_special_tokens(
    tokenizer: "PreTrainedTokenizerBase", class_tokenizer: "PreTrainedTokenizerBase"
) -> None:
    """Give a tokenizer the special tokens that another class names and its files do not."""
    vocabulary = tokenizer.get_vocab()
    for token_name, token in class_tokenizer.special_tokens_map.items():
        if getattr(tokenizer, token_name, None) is None and token in vocabulary:
            setattr(tokenizer, token_name, token)


def _find_tokenizer_json(name: str) -> str | None:
    """Return the tokenizer.json of a folder, or of a repository in the Hub's cache, if any."""
    from transformers.utils import cached_file

    path: str | None = cached_file(
        name,
        "tokenizer.json",
        local_files_only=True,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    return path


def _id_rules(backend: "Tokenizer") -> Any:
    """Return the parts of a tokenizer that decide the ids of a text; equal for equal rules."""
    description = json.loads(backend.to_str())
    return _drop_defaults(
        {key: part for key, part in description.items() if key not in _PARTS_WITHOUT_EFFECT_ON_IDS}
    )


def _drop_defaults(part: Any) -> Any:
    """Return a part of a tokenizer.json without null, empty and false values, and offsets.

    Some classes write these values, and others leave them out.
    """
    if isinstance(part, dict):
        return {
            key: _drop_defaults(value)
            for key, value in part.items()
            if value not in (None, "") and value is not False and key != "trim_offsets"
        }
    # A vocabulary or merges: millions of values that need no change.
    if isinstance(part, list) and part and isinstance(part[0], dict):
        return [_drop_defaults(value) for value in part]
    return part
