"""Tokenizers for data preparation, loaded without transformers if possible.

The `tokenizers` library can read most tokenizers directly, in a tenth of the time that `import
transformers` takes. If transformers could add or change anything, it loads the tokenizer.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from llm.errors import ConfigError
from llm.runtime.offline import offline_if_unreachable
from llm.tokenizers.load_tokenizer import (
    TokenizerFiles,
    compute_backend_fingerprint,
    compute_fingerprint,
    count_ids,
    find_end_of_text,
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
    with offline_if_unreachable(options.tokenizer_name):
        tokenizer = load_tokenizer(options, trust_remote_code=trust_remote_code)
    return wrap_transformers_tokenizer(tokenizer, name)


def wrap_transformers_tokenizer(tokenizer: "PreTrainedTokenizerBase", name: str) -> TextTokenizer:
    """Wrap a tokenizer that transformers has loaded; both share the backend."""
    backend = getattr(tokenizer, "backend_tokenizer", None)

    if backend is not None:
        backend.encode_special_tokens = True
    return TextTokenizer(
        name=name,
        backend=backend,
        encode_slow=partial(_encode_slow, tokenizer) if backend is None else None,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=tokenizer.bos_token_id,
        size=count_ids(backend, len(tokenizer)),
        fingerprint=compute_fingerprint(tokenizer),
    )


def _encode_slow(tokenizer: "PreTrainedTokenizerBase", text: str) -> list[int]:
    """Return the ids of a text by a tokenizer in Python; names of special tokens are text."""
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)
    return ids


def _load_without_transformers(files: TokenizerFiles, name: str) -> TextTokenizer | None:
    """Load a tokenizer; return None if transformers is needed, or can explain the error."""
    try:
        loaded_backend = _read_backend(files)
    except ConfigError:
        raise
    except Exception:  # a broken file; load_tokenizer explains the error
        return None
    if loaded_backend is None:
        return None
    backend = loaded_backend.backend
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = True
    boundary_tokens = {
        "bos_token_id": _find_id(backend, loaded_backend.bos_token),
        "eos_token_id": _find_id(backend, loaded_backend.eos_token),
    }
    return TextTokenizer(
        name=name,
        backend=backend,
        encode_slow=None,
        size=count_ids(backend, 0),
        fingerprint=compute_backend_fingerprint(backend, **boundary_tokens),
        **boundary_tokens,
    )


class _LoadedBackend(NamedTuple):
    """A tokenizer of the library, and the names of the tokens that begin and end a text."""

    backend: "Tokenizer"
    bos_token: str | None
    eos_token: str | None


def _find_id(backend: "Tokenizer", token: str | None) -> int | None:
    return None if token is None else backend.token_to_id(token)


def _read_backend(files: TokenizerFiles) -> _LoadedBackend | None:
    """Read a tokenizer without transformers; None if transformers could add or change anything."""
    if files.kind == "pair":
        return _read_vocab_and_merges(files.name, files.merges_file)
    if files.kind == "model":
        model = convert_sentencepiece(Path(files.name))
        special_tokens = model.special_tokens
        return _LoadedBackend(
            model.backend, special_tokens.get("bos_token"), special_tokens.get("eos_token")
        )
    if files.kind == "file":
        return _read_tokenizer_json(Path(files.name), config=None)
    folder = Path(files.name)
    if any((folder / file_name).exists() for file_name in _TRANSFORMERS_FILES):
        return None
    config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    is_unchanged = config.get("tokenizer_class") in _UNCHANGED_CLASSES
    if not is_unchanged or not config.keys() <= _IGNORED_CONFIG_KEYS:
        return None
    return _read_tokenizer_json(folder / "tokenizer.json", config)


def _read_vocab_and_merges(vocab_file: str, merges_file: str) -> _LoadedBackend:
    """Read GPT-2's two files as transformers' GPT2Tokenizer does."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    affixes = {"continuing_subword_prefix": "", "end_of_word_suffix": ""}
    backend = Tokenizer(models.BPE.from_file(vocab_file, merges_file, **affixes))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens([AddedToken(_END_OF_TEXT, special=True)])
    return _LoadedBackend(backend, _END_OF_TEXT, _END_OF_TEXT)


def _read_tokenizer_json(path: Path, config: dict[str, str] | None) -> _LoadedBackend | None:
    """Read a tokenizer.json; None if transformers would add a token to it.

    Args:
        path: The file.
        config: The tokenizer_config.json next to it; None without one.
    """
    from tokenizers import Tokenizer

    backend = Tokenizer.from_file(str(path))
    id_by_token = {
        token.content: token_id for token_id, token in backend.get_added_tokens_decoder().items()
    }
    required_tokens = [token for key, token in (config or {}).items() if key.endswith("_token")]
    if backend.padding:
        required_tokens.append(backend.padding["pad_token"])
    if not id_by_token.keys() >= set(required_tokens):  # transformers would add them
        return None
    if config is None:
        return _LoadedBackend(backend, None, find_end_of_text(id_by_token))
    return _LoadedBackend(backend, config.get("bos_token"), config.get("eos_token"))
