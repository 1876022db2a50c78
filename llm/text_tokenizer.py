"""What turns text into ids when data is prepared: loaded without transformers where it can be.

Most tokenizers are a file that the `tokenizers` library reads by itself, in a tenth of the time
that `import transformers` takes. Where transformers would add or change anything, it is asked.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llm.errors import ConfigError
from llm.sentencepiece_model import convert_sentencepiece
from llm.tokenizer import (
    FilePlace,
    ModelPlace,
    NamedPlace,
    PairPlace,
    Place,
    backend_fingerprint,
    end_of_text,
    fingerprint,
    load_tokenizer,
    locate_tokenizer,
)

if TYPE_CHECKING:
    from tokenizers import AddedToken, Tokenizer
    from transformers import PreTrainedTokenizerBase

_PLAIN_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")
"""Classes of transformers that take a tokenizer.json as it is."""
_END_OF_TEXT = "<|endoftext|>"
_Found = tuple["Tokenizer", str | None, str | None]
"""A backend with the tokens that begin and end a text."""


@dataclass(frozen=True, kw_only=True)
class TextTokenizer:
    """A tokenizer, down to what encoding documents needs.

    Attributes:
        name: As the user gave it.
        backend: Encodes fast; None for a tokenizer written in Python. The name of a special
            token in a text is text to it, until its `encode_special_tokens` is set to False.
        encode_slow: Encodes where there is no backend: no special tokens are added, and their
            names in a text are text.
        eos_token_id: Id of the token that ends a text; None where there is none.
        bos_token_id: Id of the token that begins one; None where there is none.
        size: Number of tokens, with those added to the vocabulary.
        fingerprint: Equal for tokenizers that give equal ids, `llm.tokenizer.fingerprint`.
    """

    name: str
    backend: "Tokenizer | None"
    encode_slow: Callable[[str], list[int]] | None
    eos_token_id: int | None
    bos_token_id: int | None
    size: int
    fingerprint: str


def load_text_tokenizer(
    *,
    name: str | None,
    vocab_file: str | Path | None,
    merges_file: str | Path | None,
    use_fast: bool = True,
    trust_remote_code: bool = False,
) -> TextTokenizer:
    """Load a tokenizer for text, by the options and with the errors of `load_tokenizer`.

    Args:
        name: A Hub name, a folder, a `tokenizer.json` or a SentencePiece `.model` file.
        vocab_file: GPT-2's `vocab.json`, together with `merges_file` and instead of `name`.
        merges_file: GPT-2's `merges.txt`.
        use_fast: Prefer the Rust implementation where there are two.
        trust_remote_code: Run the Python code that a tokenizer brings along.

    Returns:
        The tokenizer, with the ids and the fingerprint that `load_tokenizer` leads to.

    Raises:
        ConfigError: Nothing was named, a file is missing or broken, or the Hub is out of reach.
    """
    place = locate_tokenizer(name=name, vocab_file=vocab_file, merges_file=merges_file)
    shown = name if name is not None else f"{vocab_file}, {merges_file}"
    if use_fast:
        direct = _direct(place, shown)
        if direct is not None:
            return direct
    tokenizer = load_tokenizer(
        name=name,
        vocab_file=vocab_file,
        merges_file=merges_file,
        use_fast=use_fast,
        trust_remote_code=trust_remote_code,
    )
    return from_transformers(tokenizer, shown)


def from_transformers(tokenizer: "PreTrainedTokenizerBase", name: str) -> TextTokenizer:
    """The same for a tokenizer that transformers has loaded, whose backend it shares."""
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
        size=len(tokenizer),
        fingerprint=fingerprint(tokenizer),
    )


def _direct(place: Place, name: str) -> TextTokenizer | None:
    """The tokenizer without transformers; None where only transformers knows, or can explain."""
    found: _Found | None
    try:
        match place:
            case PairPlace():
                found = _read_pair(place)
            case FilePlace():
                found = _read_file(place.file)
            case ModelPlace():
                found = _read_model(place.file)
            case NamedPlace():
                found = _read_folder(Path(place.name))
    except ConfigError:
        raise
    except Exception:
        # A broken file: load_tokenizer says so in a sentence.
        return None
    if found is None:
        return None
    backend, bos, eos = found
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = True
    ends = {
        "bos_token_id": None if bos is None else backend.token_to_id(bos),
        "eos_token_id": None if eos is None else backend.token_to_id(eos),
    }
    return TextTokenizer(
        name=name,
        backend=backend,
        encode_slow=None,
        size=backend.get_vocab_size(),
        fingerprint=backend_fingerprint(backend, **ends),
        **ends,
    )


def _read_pair(place: PairPlace) -> _Found:
    """What transformers' GPT2Tokenizer makes of the two files."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    model = models.BPE.from_file(
        str(place.vocab_file),
        str(place.merges_file),
        continuing_subword_prefix="",
        end_of_word_suffix="",
    )
    backend = Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens([AddedToken(_END_OF_TEXT, special=True)])
    return backend, _END_OF_TEXT, _END_OF_TEXT


def _read_file(file: Path) -> _Found | None:
    from tokenizers import Tokenizer

    backend = Tokenizer.from_file(str(file))
    added = {token.content: id for id, token in backend.get_added_tokens_decoder().items()}
    if _fills_with_unknown(backend, added):
        return None
    return backend, None, end_of_text(added)


def _read_model(file: Path) -> _Found:
    model = convert_sentencepiece(file)
    special = model.special_tokens
    return model.backend, special.get("bos_token"), special.get("eos_token")


def _read_folder(folder: Path) -> _Found | None:
    from tokenizers import Tokenizer

    files = {name: folder / f"{name}.json" for name in ("tokenizer", "tokenizer_config", "config")}
    if not files["tokenizer"].is_file() or not files["tokenizer_config"].is_file():
        return None
    # A model's type may decide on the tokenizer's class, which may build the backend anew.
    if files["config"].exists():
        return None
    config = json.loads(files["tokenizer_config"].read_text(encoding="utf-8"))
    unclear = ("auto_map", "fast_tokenizer_files")
    if config.get("tokenizer_class") not in _PLAIN_CLASSES or any(key in config for key in unclear):
        return None
    legacy = ("special_tokens_map.json", "added_tokens.json")
    if "added_tokens_decoder" not in config and any((folder / name).exists() for name in legacy):
        return None
    backend = Tokenizer.from_file(str(files["tokenizer"]))
    by_id = backend.get_added_tokens_decoder()
    added = {token.content: id for id, token in by_id.items()}
    if _fills_with_unknown(backend, added) or not _all_there(config, by_id):
        return None
    return backend, _content(config.get("bos_token")), _content(config.get("eos_token"))


def _fills_with_unknown(backend: "Tokenizer", added: dict[str, int]) -> bool:
    """Whether transformers would add a token because the file's padding names it."""
    return backend.padding is not None and backend.padding["pad_token"] not in added


def _all_there(config: dict[str, Any], by_id: "dict[int, AddedToken]") -> bool:
    """Whether all tokens of a tokenizer_config.json stand in the tokenizer.json just so.

    If one does not, transformers adds it.
    """
    known = {token.content for token in by_id.values()}
    if any(name not in known for name in _named_tokens(config)):
        return False
    for id, described in config.get("added_tokens_decoder", {}).items():
        token = by_id.get(int(id))
        if token is None or not isinstance(described, dict):
            return False
        facts = {key: value for key, value in described.items() if key != "__type"}
        if {**token.__getstate__(), **facts} != token.__getstate__():
            return False
    return True


def _named_tokens(config: dict[str, Any]) -> Iterator[str | None]:
    """The tokens that a tokenizer_config.json names: `eos_token`, extra ones, ..."""
    for key, value in config.items():
        if key.endswith("_token") and not (value is None or isinstance(value, bool)):
            yield _content(value)
        if key in ("extra_special_tokens", "additional_special_tokens") and value:
            for token in value.values() if isinstance(value, dict) else value:
                yield _content(token)


def _content(token: Any) -> str | None:
    """The text of a token, which is written as such or as a table of its properties."""
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else None
