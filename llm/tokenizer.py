"""Any tokenizer by name, folder or files, and a fingerprint of the ids that it gives."""

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING

from llm.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.json",
    "tokenizer.model",
    "spiece.model",
    "vocab.txt",
    "tekken.json",
)
_END_OF_TEXT = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>")
_TOO_LONG = "sequence-length-is-longer-than-the-specified-maximum"
"""The library's own name for the warning that it gives once."""


def load_tokenizer(
    *,
    name: str | None,
    vocab_file: str | Path | None,
    merges_file: str | Path | None,
    use_fast: bool,
    trust_remote_code: bool,
) -> "PreTrainedTokenizerBase":
    """Load a tokenizer.

    Args:
        name: A Hub name, a folder, or a `tokenizer.json` file.
        vocab_file: GPT-2's `vocab.json`, together with `merges_file` and instead of `name`.
        merges_file: GPT-2's `merges.txt`.
        use_fast: Prefer the Rust implementation where there are two.
        trust_remote_code: Run the Python code that a tokenizer brings along.

    Returns:
        The tokenizer, which encodes texts of any length without a warning.

    Raises:
        ConfigError: Nothing was named, a file is missing or broken, or the Hub is out of reach.
    """
    if vocab_file is not None or merges_file is not None:
        tokenizer = _from_pair(vocab_file, merges_file)
    elif name is None:
        raise ConfigError(
            "No tokenizer is named: set --tokenizer_name to a Hub name, a folder or a "
            "tokenizer.json file, or give --vocab_file and --merges_file."
        )
    elif Path(name).is_file():
        tokenizer = _from_file(Path(name))
    elif _says_no_class(Path(name)) and (Path(name) / "tokenizer.json").is_file():
        tokenizer = _from_file(Path(name) / "tokenizer.json")
    elif _says_no_class(Path(name)) and (Path(name) / "merges.txt").is_file():
        tokenizer = _from_pair(Path(name) / "vocab.json", Path(name) / "merges.txt")
    else:
        tokenizer = _from_name(name, use_fast=use_fast, trust_remote_code=trust_remote_code)
    # Documents are encoded whole, whatever the model's length, and never filled up.
    tokenizer.deprecation_warnings[_TOO_LONG] = True
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        backend.no_truncation()
        backend.no_padding()
    return tokenizer


def fingerprint(tokenizer: "PreTrainedTokenizerBase") -> str:
    """Sixteen hex digits that two tokenizers share when they give every text the same ids."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        facts = json.loads(backend.to_str())
        facts["truncation"] = facts["padding"] = None
    else:
        facts = {
            "class": type(tokenizer).__name__,
            "vocab": tokenizer.get_vocab(),
            "special": sorted(tokenizer.all_special_tokens),
        }
    # A document separator is one of these, added outside the encoder.
    facts["ends"] = [tokenizer.bos_token_id, tokenizer.eos_token_id]
    text = json.dumps(facts, sort_keys=True, ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _says_no_class(folder: Path) -> bool:
    """A folder with a tokenizer's files alone, which does not say what class reads them."""
    described = ("tokenizer_config.json", "config.json")
    return folder.is_dir() and not any((folder / file).is_file() for file in described)


def _from_pair(
    vocab_file: str | Path | None, merges_file: str | Path | None
) -> "PreTrainedTokenizerBase":
    if vocab_file is None or merges_file is None:
        given, missing = ("--vocab_file", "--merges_file")
        if vocab_file is None:
            given, missing = missing, given
        raise ConfigError(f"{given} is given without {missing}: GPT-2's tokenizer needs both.")
    for option, file in (("--vocab_file", vocab_file), ("--merges_file", merges_file)):
        if not Path(file).is_file():
            raise ConfigError(f"{option} {file} does not exist.")
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

    if (file.parent / "tokenizer_config.json").is_file() and file.name == "tokenizer.json":
        return _from_name(str(file.parent), use_fast=True, trust_remote_code=False)
    try:
        tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(file))
    except Exception as error:
        raise ConfigError(
            f"--tokenizer_name {file} is not a tokenizer.json file: {_first_line(error)}"
        ) from error
    # The file alone does not say which token ends a text; a few names can mean nothing else.
    known = tokenizer.get_added_vocab()
    tokenizer.eos_token = next((token for token in _END_OF_TEXT if token in known), None)
    return tokenizer


def _from_name(name: str, *, use_fast: bool, trust_remote_code: bool) -> "PreTrainedTokenizerBase":
    folder = Path(name)
    local = folder.is_dir()
    if local and not any((folder / file).is_file() for file in _TOKENIZER_FILES):
        raise ConfigError(
            f"The folder {name} holds no tokenizer (tokenizer.json, tokenizer_config.json, or "
            "vocab.json with merges.txt): set --tokenizer_name to one that does."
        )
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
        if local:
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
