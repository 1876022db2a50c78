"""Load any tokenizer by name, folder or files; fingerprint the ids that it gives."""

import hashlib
import json
import logging
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from llm.errors import ConfigError, one_line
from llm.tokenizers.file_rules import restore_file_rules
from llm.tokenizers.options import TokenizerOptions

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

_TOKENIZER_FILE_NAMES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
    "tekken.json",
)
_END_OF_TEXT_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>")
_LENGTH_WARNING = "sequence-length-is-longer-than-the-specified-maximum"
"""The library's name for a warning that it gives once."""
PROBE = "The  Quick br\u00f6wn fox;\n\t12345 + don't, \uff21\uff22 \uff11 \u72d0 \U0001f98a"
"""A text with case, accents, spaces, digits, wide letters and rare characters."""
_ADDED_TOKEN_FIELDS = ("content", "single_word", "lstrip", "rstrip", "normalized", "special")

logger = logging.getLogger("llm.tokenizers")


@dataclass(frozen=True, kw_only=True)
class TokenizerFiles:
    """The files of a tokenizer, and their format.

    Attributes:
        kind: `pair` for GPT-2's two files; `file` for a `tokenizer.json`, and `model` for a
            SentencePiece model, without further files; `named` for a Hub name, or a folder with
            files that name their class.
        name: Path of the file or folder, or the Hub name; for a pair, the `vocab.json`.
        merges_file: The `merges.txt` of a pair.
    """

    kind: Literal["pair", "file", "model", "named"]
    name: str
    merges_file: str = ""


def locate_tokenizer(
    options: TokenizerOptions, *, model_name_or_path: str | None = None
) -> TokenizerFiles:
    """Find the tokenizer that the options name, without opening it.

    Args:
        options: A Hub name, a folder, a `tokenizer.json`, a SentencePiece `.model` file, or GPT-2's
            two files.
        model_name_or_path: A model's Hub name or folder; its tokenizer is used if the options name
            none.

    Raises:
        ConfigError: Nothing was named, or a local path does not exist.
    """
    if options.vocab_file is not None or options.merges_file is not None:
        return _locate_gpt2_files(options.vocab_file, options.merges_file)
    name = options.tokenizer_name or model_name_or_path
    if name is None:
        raise ConfigError(
            "No tokenizer is named: set --tokenizer_name to a Hub name, a folder, a "
            "tokenizer.json or a .model file, or give --vocab_file and --merges_file."
        )
    path = Path(name)
    if path.is_dir():
        return _locate_in_folder(path)
    if not path.is_file():
        return TokenizerFiles(kind="named", name=name)
    if path.suffix == ".model":
        return TokenizerFiles(kind="model", name=str(path))
    if path.name == "tokenizer.json" and (path.parent / "tokenizer_config.json").is_file():
        return TokenizerFiles(kind="named", name=str(path.parent))
    return TokenizerFiles(kind="file", name=str(path))


def _locate_in_folder(folder: Path) -> TokenizerFiles:
    """Find the tokenizer in a folder; the kind of its files decides if none names a class."""
    if not (_has_any_file(folder, _TOKENIZER_FILE_NAMES) or any(folder.glob("*.model"))):
        raise ConfigError(
            f"The folder {folder} holds no tokenizer (tokenizer.json, tokenizer_config.json, a "
            "SentencePiece .model, or vocab.json with merges.txt): set --tokenizer_name to one "
            "that does."
        )
    if _has_any_file(folder, ("tokenizer_config.json", "config.json")):  # which name a class
        return TokenizerFiles(kind="named", name=str(folder))
    if (folder / "tokenizer.json").is_file():
        return TokenizerFiles(kind="file", name=str(folder / "tokenizer.json"))
    if (folder / "merges.txt").is_file():
        return _locate_gpt2_files(str(folder / "vocab.json"), str(folder / "merges.txt"))
    sentencepiece_models = [*folder.glob("*.model")]
    if len(sentencepiece_models) == 1:
        return TokenizerFiles(kind="model", name=str(sentencepiece_models[0]))
    return TokenizerFiles(kind="named", name=str(folder))


def _has_any_file(folder: Path, names: Sequence[str]) -> bool:
    return any((folder / name).is_file() for name in names)


def _locate_gpt2_files(vocab_file: str | None, merges_file: str | None) -> TokenizerFiles:
    """Return GPT-2's two files; refuse one without the other, or one that does not exist."""
    if vocab_file is None:
        raise ConfigError(
            "--merges_file is given without --vocab_file: GPT-2's tokenizer needs both."
        )
    if merges_file is None:
        raise ConfigError(
            "--vocab_file is given without --merges_file: GPT-2's tokenizer needs both."
        )
    for option, file in (("--vocab_file", vocab_file), ("--merges_file", merges_file)):
        if not Path(file).is_file():
            raise ConfigError(f"{option} {file} does not exist.")
    # Through Path, like all paths here, so that messages spell them the same way.
    return TokenizerFiles(
        kind="pair", name=str(Path(vocab_file)), merges_file=str(Path(merges_file))
    )


def load_tokenizer(
    options: TokenizerOptions,
    *,
    model_name_or_path: str | None = None,
    model_config: "PreTrainedConfig | None" = None,
    trust_remote_code: bool = False,
    local_files_only: bool = False,
) -> "PreTrainedTokenizerBase":
    """Load a tokenizer.

    Args:
        options: Which one, as for `locate_tokenizer`.
        model_name_or_path: A model's Hub name or folder; its tokenizer is used if the options name
            none.
        model_config: A model's configuration. If the tokenizer comes from the same folder or Hub
            name, its `config.json` is not read again.
        trust_remote_code: Run the Python code that comes with a tokenizer.
        local_files_only: Do not ask the Hub; a name is looked up in its cache alone.

    Returns:
        The tokenizer, which encodes texts of any length without a warning.

    Raises:
        ConfigError: Nothing was named, a file is missing or broken, or the Hub cannot be reached.
    """
    files = locate_tokenizer(options, model_name_or_path=model_name_or_path)
    if files.kind == "model":
        tokenizer = _convert_sentencepiece(files.name)
    else:
        try:
            tokenizer = _read_by_transformers(
                files,
                model_config=model_config,
                use_fast=not options.use_slow_tokenizer,
                trust_remote_code=trust_remote_code,
                local_files_only=local_files_only,
            )
        except Exception as error:  # the libraries raise many types of errors
            raise ConfigError(_describe_load_error(files, error, local_files_only)) from error
    # A setting of this call, which `save_pretrained` would write into the copies of the tokenizer.
    tokenizer.init_kwargs.pop("local_files_only", None)
    _encode_texts_of_any_length(tokenizer)
    return tokenizer


def _encode_texts_of_any_length(tokenizer: "PreTrainedTokenizerBase") -> None:
    """Turn off truncation and padding, and the warning about texts longer than the model."""
    tokenizer.deprecation_warnings[_LENGTH_WARNING] = True
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        backend.no_truncation()
        backend.no_padding()


def _read_by_transformers(
    files: TokenizerFiles,
    *,
    model_config: "PreTrainedConfig | None",
    use_fast: bool,
    trust_remote_code: bool,
    local_files_only: bool,
) -> "PreTrainedTokenizerBase":
    """Read a tokenizer of another kind than `model` by transformers' class for its files."""
    # Imported late: `text_tokenizer.load_text_tokenizer` rarely needs it.
    import transformers

    tokenizer: PreTrainedTokenizerBase
    if files.kind == "pair":
        tokenizer = transformers.GPT2Tokenizer(vocab=files.name, merges=files.merges_file)
        return tokenizer
    if files.kind == "file":
        tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=files.name)
        tokenizer.eos_token = find_end_of_text(tokenizer.get_added_vocab())
        return tokenizer
    if not (local_files_only or Path(files.name).exists()):
        logger.info(f"asking the Hugging Face Hub for the tokenizer {files.name}")
    # A changed configuration has no name, so it never chooses the class.
    has_config = model_config is not None and Path(model_config.name_or_path) == Path(files.name)
    tokenizer = transformers.AutoTokenizer.from_pretrained(
        files.name,
        config=model_config if has_config else None,
        use_fast=use_fast,
        trust_remote_code=trust_remote_code,
        local_files_only=local_files_only,
    )
    return restore_file_rules(tokenizer, files.name)


def _convert_sentencepiece(path: str) -> "PreTrainedTokenizerBase":
    """Convert a SentencePiece model in a subprocess; most runs do not need its libraries."""
    import tokenizers
    import transformers

    command = [sys.executable, "-m", "llm.tokenizers.sentencepiece_model", path]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    if process.returncode != 0:
        error_lines = process.stderr.strip().splitlines() or [f"exit code {process.returncode}"]
        raise ConfigError(error_lines[-1].removeprefix("error: "))
    model = json.loads(process.stdout)
    backend = tokenizers.Tokenizer.from_str(model["backend"])
    backend.encode_special_tokens = True  # not part of the JSON
    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend, **model["special_tokens"])


def _describe_load_error(files: TokenizerFiles, error: Exception, local_files_only: bool) -> str:
    """Return a sentence about a tokenizer that the libraries cannot load."""
    reason, name = one_line(error), files.name
    if files.kind == "pair":
        return (
            f"--vocab_file {name} and --merges_file {files.merges_file} are not GPT-2's "
            f"vocab.json and merges.txt: {reason}."
        )
    if files.kind == "file":
        return f"--tokenizer_name {name} is not a tokenizer.json file: {reason}."
    if "trust_remote_code" in str(error):
        return (
            f"The tokenizer {name} has its own Python code: add --trust_remote_code to this "
            "command if you trust its authors."
        )
    if Path(name).is_dir():
        return f"The tokenizer in the folder {name} cannot be read: {reason}."
    if local_files_only:
        return (
            f"The tokenizer {name} is neither a local folder nor in the Hugging Face Hub's cache; "
            "name it in --tokenizer_name to download it."
        )
    return (
        f"The tokenizer {name} is not a local folder, and the Hugging Face Hub does not provide it "
        "or cannot be reached: check the name and the network, or set --tokenizer_name to a local "
        f"folder ({reason})."
    )


def compute_fingerprint(tokenizer: "PreTrainedTokenizerBase") -> str:
    """Return sixteen hex digits, equal for tokenizers that give every text the same ids.

    It covers the ids of texts encoded without special tokens, and the ids of the tokens that begin
    and end a text. Sidecars contain these digits: after a change here, no token files would match
    their tokenizer.
    """
    bos_token_id, eos_token_id = tokenizer.bos_token_id, tokenizer.eos_token_id
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        return compute_backend_fingerprint(
            backend, bos_token_id=bos_token_id, eos_token_id=eos_token_id
        )
    state = {
        "class": type(tokenizer).__name__,
        "vocab": tokenizer.get_vocab(),
        "special": sorted(tokenizer.all_special_tokens),
        # The settings of Python code are unknown; their effect shows in a text.
        "probe": tokenizer.encode(PROBE, add_special_tokens=False),
        "ends": (bos_token_id, eos_token_id),
    }
    return _digest_states([json.dumps(state, sort_keys=True).encode()])


def count_ids(backend: "Tokenizer | None", num_tokens: int) -> int:
    """Return the number of tokens; if ids have gaps, the largest id plus one."""
    ids = {} if backend is None else backend.get_vocab()
    return max(num_tokens, 1 + max(ids.values(), default=-1))


def choose_end_token(eos_token_id: int | None, append_eos: bool) -> int | None:
    """Return the token that ends each document, or None without `append_eos`.

    Raises:
        ConfigError: The tokenizer has no such token.
    """
    if append_eos and eos_token_id is None:
        raise ConfigError(
            "The tokenizer has no end-of-text token to put between documents; pass "
            "--no_append_eos, or use another tokenizer."
        )
    return eos_token_id if append_eos else None


def choose_begin_token(bos_token_id: int | None, prepend_bos: bool) -> int | None:
    """Return the token that begins each document, or None without `prepend_bos`.

    Raises:
        ConfigError: The tokenizer has no such token.
    """
    if prepend_bos and bos_token_id is None:
        raise ConfigError(
            "The tokenizer has no token that begins a text; leave --prepend_bos out, or use "
            "another tokenizer."
        )
    return bos_token_id if prepend_bos else None


def compute_backend_fingerprint(
    backend: "Tokenizer", *, bos_token_id: int | None, eos_token_id: int | None
) -> str:
    """Return the fingerprint of a tokenizer written in Rust.

    Template, decoder, truncation and padding are left out: they do not change these ids.
    """
    added_tokens = [
        [token_id, *(getattr(token, name) for name in _ADDED_TOKEN_FIELDS)]
        for token_id, token in sorted(backend.get_added_tokens_decoder().items())
    ]
    # Each part is dumped as JSON, with the vocabulary in the order of the ids.
    components = (backend.model, backend.normalizer, backend.pre_tokenizer)
    states = [b"" if component is None else component.__getstate__() for component in components]
    return _digest_states(
        [*states, json.dumps([added_tokens, bos_token_id, eos_token_id]).encode()]
    )


def _digest_states(states: list[bytes]) -> str:
    """Return sixteen hex digits of a SHA-256 over byte strings and their lengths."""
    digest = hashlib.sha256()
    for state in states:
        digest.update(len(state).to_bytes(8, "little"))
        digest.update(state)
    return digest.hexdigest()[:16]


def find_end_of_text(added_tokens: dict[str, int]) -> str | None:
    """Return the token that ends a text, for a `tokenizer.json` that does not name it.

    Args:
        added_tokens: The tokens outside the vocabulary; a few names have no other meaning.
    """
    return next((token for token in _END_OF_TEXT_NAMES if token in added_tokens), None)
