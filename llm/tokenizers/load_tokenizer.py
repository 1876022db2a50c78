"""Any tokenizer by name, folder or files, and a fingerprint of the ids that it gives."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from llm.errors import ConfigError
from llm.tokenizers.options import TokenizerOptions
from llm.tokenizers.sentencepiece import convert_sentencepiece

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
    "tekken.json",
)
_END_OF_TEXT = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>")
_TOO_LONG = "sequence-length-is-longer-than-the-specified-maximum"
"""The library's own name for the warning that it gives once."""
_PROBE = "The  Quick br\u00f6wn fox;\n\t12345 + don't, \uff21\uff22 \uff11 \u72d0 \U0001f98a"
"""A text that shows case, accents, spaces, digits, wide letters and rare characters."""
_ADDED_FACTS = ("content", "single_word", "lstrip", "rstrip", "normalized", "special")


@dataclass(frozen=True, kw_only=True)
class PairPlace:
    """GPT-2's two files."""

    vocab_file: Path
    merges_file: Path


@dataclass(frozen=True, kw_only=True)
class FilePlace:
    """A `tokenizer.json` that no other file describes."""

    file: Path


@dataclass(frozen=True, kw_only=True)
class ModelPlace:
    """A SentencePiece model that no other file describes."""

    file: Path


@dataclass(frozen=True, kw_only=True)
class NamedPlace:
    """A Hub name, or a folder whose files say what class reads them."""

    name: str


Place = PairPlace | FilePlace | ModelPlace | NamedPlace


def locate_tokenizer(options: TokenizerOptions, *, model_name_or_path: str | None = None) -> Place:
    """What the options name, without opening it.

    Args:
        options: A Hub name, a folder, a `tokenizer.json` or a SentencePiece `.model` file, or in
            its place GPT-2's two files.
        model_name_or_path: A model's Hub name or folder, whose tokenizer is meant where the
            options name none.

    Raises:
        ConfigError: Nothing was named, or what is named on this machine is not there.
    """
    if options.vocab_file is not None or options.merges_file is not None:
        return _pair(options.vocab_file, options.merges_file)
    name = options.tokenizer_name or model_name_or_path
    if name is None:
        raise ConfigError(
            "No tokenizer is named: set --tokenizer_name to a Hub name, a folder, a "
            "tokenizer.json or a .model file, or give --vocab_file and --merges_file."
        )
    path = Path(name)
    if path.is_file():
        return _single_file(path)
    return _folder(path) if path.is_dir() else NamedPlace(name=name)


def load_tokenizer(
    options: TokenizerOptions,
    *,
    model_name_or_path: str | None = None,
    trust_remote_code: bool = False,
) -> "PreTrainedTokenizerBase":
    """Load a tokenizer.

    Args:
        options: Which one: a Hub name, a folder, a `tokenizer.json` or a SentencePiece `.model`
            file, or in its place GPT-2's two files.
        model_name_or_path: A model's Hub name or folder, whose tokenizer is taken where the
            options name none.
        trust_remote_code: Run the Python code that a tokenizer brings along.

    Returns:
        The tokenizer, which encodes texts of any length without a warning.

    Raises:
        ConfigError: Nothing was named, a file is missing or broken, or the Hub is out of reach.
    """
    place = locate_tokenizer(options, model_name_or_path=model_name_or_path)
    match place:
        case PairPlace():
            tokenizer = _from_pair(place.vocab_file, place.merges_file)
        case FilePlace():
            tokenizer = _from_file(place.file)
        case ModelPlace():
            tokenizer = _from_model(place.file)
        case NamedPlace():
            tokenizer = _from_name(
                place.name,
                use_fast=not options.use_slow_tokenizer,
                trust_remote_code=trust_remote_code,
            )
    # Documents are encoded whole, whatever the model's length, and never filled up.
    tokenizer.deprecation_warnings[_TOO_LONG] = True
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        backend.no_truncation()
        backend.no_padding()
    return tokenizer


def fingerprint(tokenizer: "PreTrainedTokenizerBase") -> str:
    """Sixteen hex digits that two tokenizers share when they give every text the same ids.

    The ids are those of encoding without special tokens, and the ids of the tokens that begin
    and end a text.
    """
    ends = (tokenizer.bos_token_id, tokenizer.eos_token_id)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        return backend_fingerprint(backend, bos_token_id=ends[0], eos_token_id=ends[1])
    facts = {
        "class": type(tokenizer).__name__,
        "vocab": tokenizer.get_vocab(),
        "special": sorted(tokenizer.all_special_tokens),
        # Python code may hold any settings; what they do shows in a text.
        "probe": tokenizer.encode(_PROBE, add_special_tokens=False),
        "ends": ends,
    }
    return _digest([json.dumps(facts, sort_keys=True).encode()])


def backend_fingerprint(
    backend: "Tokenizer", *, bos_token_id: int | None, eos_token_id: int | None
) -> str:
    """Return the fingerprint of a tokenizer that is written in Rust.

    Template, decoder, truncation and padding have no part in it: none touches these ids.
    """
    added = [
        [id, *(getattr(token, name) for name in _ADDED_FACTS)]
        for id, token in sorted(backend.get_added_tokens_decoder().items())
    ]
    # The parts write themselves as JSON with the vocabulary in the order of the ids.
    parts = (backend.model, backend.normalizer, backend.pre_tokenizer)
    states = [b"" if part is None else part.__getstate__() for part in parts]
    return _digest([*states, json.dumps([added, bos_token_id, eos_token_id]).encode()])


def _digest(parts: list[bytes]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()[:16]


def end_of_text(added_tokens: dict[str, int]) -> str | None:
    """The token that ends a text, for a `tokenizer.json` that does not say which one does.

    Args:
        added_tokens: The tokens beside the vocabulary, of which a few names can mean nothing else.
    """
    return next((token for token in _END_OF_TEXT if token in added_tokens), None)


def _single_file(file: Path) -> Place:
    if file.suffix == ".model":
        return ModelPlace(file=file)
    if file.name == "tokenizer.json" and (file.parent / "tokenizer_config.json").is_file():
        return NamedPlace(name=str(file.parent))
    return FilePlace(file=file)


def _folder(folder: Path) -> Place:
    models = sorted(folder.glob("*.model"))
    if not models and not any((folder / file).is_file() for file in _TOKENIZER_FILES):
        raise ConfigError(
            f"The folder {folder} holds no tokenizer (tokenizer.json, tokenizer_config.json, a "
            "SentencePiece .model, or vocab.json with merges.txt): set --tokenizer_name to one "
            "that does."
        )
    if any((folder / file).is_file() for file in ("tokenizer_config.json", "config.json")):
        return NamedPlace(name=str(folder))
    # A tokenizer's files alone, which do not say what class reads them.
    if (folder / "tokenizer.json").is_file():
        return FilePlace(file=folder / "tokenizer.json")
    if (folder / "merges.txt").is_file():
        return _pair(folder / "vocab.json", folder / "merges.txt")
    return ModelPlace(file=models[0]) if len(models) == 1 else NamedPlace(name=str(folder))


def _pair(vocab_file: str | Path | None, merges_file: str | Path | None) -> PairPlace:
    if vocab_file is None or merges_file is None:
        given, missing = ("--vocab_file", "--merges_file")
        if vocab_file is None:
            given, missing = missing, given
        raise ConfigError(f"{given} is given without {missing}: GPT-2's tokenizer needs both.")
    for option, file in (("--vocab_file", vocab_file), ("--merges_file", merges_file)):
        if not Path(file).is_file():
            raise ConfigError(f"{option} {file} does not exist.")
    return PairPlace(vocab_file=Path(vocab_file), merges_file=Path(merges_file))


def _from_pair(vocab_file: Path, merges_file: Path) -> "PreTrainedTokenizerBase":
    from transformers import GPT2Tokenizer

    try:
        return GPT2Tokenizer(vocab=str(vocab_file), merges=str(merges_file))
    except Exception as error:
        raise ConfigError(
            f"--vocab_file {vocab_file} and --merges_file {merges_file} are not GPT-2's "
            f"vocab.json and merges.txt: {_first_line(error)}"
        ) from error


def _from_file(file: Path) -> "PreTrainedTokenizerBase":
    from transformers import PreTrainedTokenizerFast

    try:
        tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(file))
    except Exception as error:
        raise ConfigError(
            f"--tokenizer_name {file} is not a tokenizer.json file: {_first_line(error)}"
        ) from error
    tokenizer.eos_token = end_of_text(tokenizer.get_added_vocab())
    return tokenizer


def _from_model(file: Path) -> "PreTrainedTokenizerBase":
    from transformers import PreTrainedTokenizerFast

    model = convert_sentencepiece(file)
    return PreTrainedTokenizerFast(tokenizer_object=model.backend, **model.special_tokens)


def _from_name(name: str, *, use_fast: bool, trust_remote_code: bool) -> "PreTrainedTokenizerBase":
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(
            name, use_fast=use_fast, trust_remote_code=trust_remote_code
        )
    except Exception as error:
        if "trust_remote_code" in str(error):
            raise ConfigError(
                f"The tokenizer {name} brings its own Python code: pass --trust_remote_code "
                "if you trust its authors."
            ) from error
        if Path(name).is_dir():
            raise ConfigError(
                f"The tokenizer in the folder {name} cannot be read: {_first_line(error)}"
            ) from error
        raise ConfigError(
            f"The tokenizer {name} is no local folder, and the Hugging Face Hub does not hand it "
            f"out or cannot be reached: check the name and the network, or set --tokenizer_name "
            f"to a local folder ({_first_line(error)})"
        ) from error


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
