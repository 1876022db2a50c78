"""Tokenizers for data preparation, loaded without transformers if possible.

The `tokenizers` library can read most tokenizers directly, in a tenth of the time that `import
transformers` takes. If transformers could add or change anything, it loads the tokenizer.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from llm.errors import ConfigError
from llm.tokenizers.load_tokenizer import (
    TokenizerFiles,
    backend_fingerprint,
    count_ids,
    find_end_of_text,
    fingerprint,
    load_tokenizer,
    locate_tokenizer,
)
from llm.tokenizers.options import TokenizerOptions
from llm.tokenizers.sentencepiece_model import convert_sentencepiece

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

_UNCHANGED_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")
"""Classes of transformers that take a tokenizer.json unchanged."""
_IGNORED_CONFIG_KEYS = {
    "tokenizer_class",
    "backend",
    "model_max_length",
    "clean_up_tokenization_spaces",
    "bos_token",
    "eos_token",
    "unk_token",
    "pad_token",
}
"""Keys of a tokenizer_config.json that do not affect ids."""
_TRANSFORMERS_FILES = ("config.json", "special_tokens_map.json", "added_tokens.json")
"""Files that can make transformers choose another class or add tokens."""
_END_OF_TEXT = "<|endoftext|>"


@dataclass(frozen=True, kw_only=True)
class TextTokenizer:
    """The parts of a tokenizer that are needed to encode documents.

    Attributes:
        name: The name given by the user.
        backend: Encodes fast; None for a tokenizer written in Python. The name of a special
            token in a text is text to it, until its `encode_special_tokens` is set to False.
        encode_slow: Encodes without a backend; adds no special tokens, and encodes their names in a
            text as text.
        eos_token_id: Id of the token that ends a text, or None.
        bos_token_id: Id of the token that begins one, or None.
        size: Number of tokens, including added tokens; if ids have gaps, the largest id plus one.
        fingerprint: Equal for tokenizers that give equal ids, `load_tokenizer.fingerprint`.
    """

    name: str
    backend: "Tokenizer | None"
    encode_slow: Callable[[str], list[int]] | None
    eos_token_id: int | None
    bos_token_id: int | None
    size: int
    fingerprint: str


def load_text_tokenizer(
    options: TokenizerOptions, *, trust_remote_code: bool = False
) -> TextTokenizer:
    """Load a tokenizer for text, with the options and errors of `load_tokenizer`.

    Args:
        options: The options that name the tokenizer.
        trust_remote_code: Run the Python code that comes with a tokenizer.

    Returns:
        The tokenizer, with the same ids and fingerprint as from `load_tokenizer`.

    Raises:
        ConfigError: Nothing was named, a file is missing or broken, or the Hub cannot be reached.
    """
    files = locate_tokenizer(options)
    name = options.tokenizer_name or f"{options.vocab_file}, {options.merges_file}"
    if not options.use_slow_tokenizer:
        text_tokenizer = _load_without_transformers(files, name)
        if text_tokenizer is not None:
            return text_tokenizer
    tokenizer = load_tokenizer(options, trust_remote_code=trust_remote_code)
    return from_transformers(tokenizer, name)


def from_transformers(tokenizer: "PreTrainedTokenizerBase", name: str) -> TextTokenizer:
    """Wrap a tokenizer that transformers has loaded; both share the backend."""
    backend = getattr(tokenizer, "backend_tokenizer", None)

    def encode_slow(text: str) -> list[int]:
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)
        return ids

    if backend is not None:
        backend.encode_special_tokens = True
    return TextTokenizer(
        name=name,
        backend=backend,
        encode_slow=encode_slow if backend is None else None,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=tokenizer.bos_token_id,
        size=count_ids(backend, len(tokenizer)),
        fingerprint=fingerprint(tokenizer),
    )


def _load_without_transformers(files: TokenizerFiles, name: str) -> TextTokenizer | None:
    """Load a tokenizer; return None if transformers is needed, or can explain the error."""
    try:
        backend_and_tokens = _read_backend(files)
    except ConfigError:
        raise
    except Exception:  # a broken file; load_tokenizer explains the error
        return None
    if backend_and_tokens is None:
        return None
    backend, bos_token, eos_token = backend_and_tokens
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = True
    boundary_tokens = {
        "bos_token_id": None if bos_token is None else backend.token_to_id(bos_token),
        "eos_token_id": None if eos_token is None else backend.token_to_id(eos_token),
    }
    return TextTokenizer(
        name=name,
        backend=backend,
        encode_slow=None,
        size=count_ids(backend, 0),
        fingerprint=backend_fingerprint(backend, **boundary_tokens),
        **boundary_tokens,
    )


def _read_backend(files: TokenizerFiles) -> "tuple[Tokenizer, str | None, str | None] | None":
    """Return a backend and the tokens that begin and end a text."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    if files.kind == "pair":  # as transformers' GPT2Tokenizer
        affixes = {"continuing_subword_prefix": "", "end_of_word_suffix": ""}
        backend = Tokenizer(models.BPE.from_file(files.name, files.merges_file, **affixes))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        backend.add_tokens([AddedToken(_END_OF_TEXT, special=True)])
        return backend, _END_OF_TEXT, _END_OF_TEXT
    if files.kind == "model":
        model = convert_sentencepiece(Path(files.name))
        special_tokens = model.special_tokens
        return model.backend, special_tokens.get("bos_token"), special_tokens.get("eos_token")
    file = Path(files.name)
    config: dict[str, str] = {}
    if files.kind == "named":
        folder, file = file, file / "tokenizer.json"
        if any((folder / file_name).exists() for file_name in _TRANSFORMERS_FILES):
            return None
        config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
        if (
            config.get("tokenizer_class") not in _UNCHANGED_CLASSES
            or not config.keys() <= _IGNORED_CONFIG_KEYS
        ):
            return None
    backend = Tokenizer.from_file(str(file))
    id_by_token = {token.content: id for id, token in backend.get_added_tokens_decoder().items()}
    named_tokens = [token for key, token in config.items() if key.endswith("_token")]
    padding_tokens = [backend.padding["pad_token"]] if backend.padding else []
    if not {*named_tokens, *padding_tokens} <= id_by_token.keys():  # transformers would add them
        return None
    eos_token = find_end_of_text(id_by_token) if files.kind == "file" else config.get("eos_token")
    return backend, config.get("bos_token"), eos_token
