"""Trains a tokenizer on text files: `llm-trainers tokenizer --input text/*.jsonl ...`.

The output is an ordinary Hugging Face tokenizer folder, renamed into place when it is complete. The
ids of a SentencePiece tokenizer are first compared with SentencePiece itself.

Exit codes: 0 trained, 1 an unforeseen error, 2 an option or input that cannot work.
"""

import contextlib
import json
import logging
import os
import re
import shutil
import socket
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from llm.config.command_line import parse_options
from llm.config.options import option, option_group
from llm.config.program import program
from llm.data.workers import limit_workers, num_cores
from llm.errors import ConfigError
from llm.prepare.text.sources import find_text_sources
from llm.prepare.text.training_texts import TrainingTexts
from llm.prepare.text_tokenizer import load_text_tokenizer
from llm.prepare.tokenizer_training import (
    END_OF_TEXT,
    NUM_BYTES,
    train_huggingface,
    train_sentencepiece,
)
from llm.runtime.files import delete
from llm.runtime.logging import counted, set_up_logging
from llm.runtime.world import ignore_ranks
from llm.tokenizers.options import TokenizerOptions
from llm.tokenizers.sentencepiece_model import convert_sentencepiece

_INPUT_GROUP, _TOKENIZER_GROUP, _OUTPUT_GROUP = "Text", "Tokenizer", "Output and running"
_SENTENCEPIECE_GROUP = "With sentencepiece"
_COMMON_OPTIONS = ("model_type", "vocab_size", "split_digits", "normalization")
_SENTENCEPIECE_OPTIONS = (
    "byte_fallback",
    "character_coverage",
    "pad_id",
    "unk_id",
    "bos_id",
    "eos_id",
)
_DEFAULT_THREADS = 16
"""The same on any machine, so a unigram model does not depend on the number of cores."""
_MAX_VOCAB_SIZE = 10_000_000
"""Forty times the largest vocabularies in use; at 10^9 the libraries abort the process."""
_MISSING_NORMALIZATIONS = {
    "huggingface": ("nmt_nfkc", "nfkc_cf", "nmt_nfkc_cf"),
    "sentencepiece": ("nfc",),
}
"""Normalizations that a library does not have."""
_TOKENIZER_FILES = {"tokenizer.json", "tokenizer_config.json", "tokenizer.model"}

logger = logging.getLogger("llm.data")


@option_group(_TOKENIZER_GROUP)
class TrainTokenizerOptions:
    """Options of `llm-trainers tokenizer`."""

    input: tuple[str, ...] = option(
        (),
        "Files, quoted patterns and folders of text, as for prepare.",
        group=_INPUT_GROUP,
        path=True,
    )
    text_column: str | None = option(
        None,
        "Column or JSON key with the text; by default `text`, else the only column of strings.",
        group=_INPUT_GROUP,
        aliases=("json_key",),
    )
    max_sentences: int | None = option(
        None,
        "Documents (lines for sentencepiece) to train on, drawn from the input.",
        group=_INPUT_GROUP,
        aliases=("input_sentence_size",),
        at_least=1,
    )
    library: Literal["huggingface", "sentencepiece"] = option(
        "huggingface",
        "huggingface trains on bytes, with the token <|endoftext|>; sentencepiece trains on "
        "letters and needs its package.",
    )
    model_type: Literal["bpe", "unigram"] = option(
        "bpe", "Segmentation: bpe merges pairs, unigram chooses the likeliest pieces."
    )
    vocab_size: int = option(
        32768, "Tokens, including special tokens.", at_least=1, at_most=_MAX_VOCAB_SIZE
    )
    split_digits: bool = option(False, "Make every digit a token.")
    normalization: Literal["identity", "nfc", "nfkc", "nmt_nfkc", "nfkc_cf", "nmt_nfkc_cf"] = (
        option(
            "identity",
            "identity, nfc or nfkc; sentencepiece has identity and, joining spaces, nfkc, nfkc_cf, "
            "nmt_nfkc (its default) and nmt_nfkc_cf.",
        )
    )
    byte_fallback: bool = option(
        False, "Write unknown letters as bytes.", group=_SENTENCEPIECE_GROUP
    )
    character_coverage: float | None = option(
        None,
        "Share of the letters that become tokens, by default 0.9995.",
        group=_SENTENCEPIECE_GROUP,
        at_least=0.98,
        at_most=1.0,
    )
    pad_id: int | None = option(
        None,
        "Id of <pad>; -1, the default, leaves it out.",
        group=_SENTENCEPIECE_GROUP,
        at_least=-1,
    )
    unk_id: int | None = option(
        None, "Id of <unk>, by default 0.", group=_SENTENCEPIECE_GROUP, at_least=0
    )
    bos_id: int | None = option(
        None, "Id of <s>, by default 1; -1 leaves it out.", group=_SENTENCEPIECE_GROUP, at_least=-1
    )
    eos_id: int | None = option(
        None, "Id of </s>, by default 2; -1 leaves it out.", group=_SENTENCEPIECE_GROUP, at_least=-1
    )
    output_dir: str | None = option(None, "Folder to write.", group=_OUTPUT_GROUP, path=True)
    overwrite: bool = option(False, "Replace an existing tokenizer.", group=_OUTPUT_GROUP)
    num_workers: int = option(
        _DEFAULT_THREADS,
        "Threads; their number changes the last digits of a unigram model.",
        group=_OUTPUT_GROUP,
        aliases=("workers", "num_threads"),
        at_least=1,
    )
    seed: int = option(1234, "Seed for drawing max_sentences.", group=_OUTPUT_GROUP, at_least=0)


@program
def main(argv: Sequence[str]) -> int:
    """Run the program; return the exit code."""
    ignore_ranks()
    set_up_logging(rank=0)
    options = parse_options(
        TrainTokenizerOptions,
        argv,
        prog="llm-trainers tokenizer",
        description="Train a tokenizer on text, for any model.",
    )
    train_tokenizer(options)
    return 0


def train_tokenizer(options: TrainTokenizerOptions) -> None:
    """Train a tokenizer and write its folder.

    Raises:
        ConfigError: An option cannot work, alone, with another option or with this much text.
        DataError: Text cannot be read.
    """
    check_options(options)
    start_time = time.monotonic()
    num_threads = limit_workers(options.num_workers, max_workers=max(_DEFAULT_THREADS, num_cores()))
    output = Path(str(options.output_dir))
    sources = find_text_sources(options.input, text_column=options.text_column)
    _check_inputs_outside(output, [path for source in sources for path in source.files])
    texts = TrainingTexts(
        sources,
        lines=options.library == "sentencepiece",
        max_sentences=options.max_sentences,
        seed=options.seed,
    )
    with _unfinished_folder(output) as folder:
        try:
            _write_tokenizer(options, texts, num_threads, folder)
        except Exception:
            if texts.error is not None:  # the libraries replace it by another error
                raise texts.error from None
            raise
        summary = _describe_result(folder, texts)
        # Again, because training may take hours.
        check_output_folder(output, overwrite=options.overwrite)
        _publish_folder(folder, output)
    logger.info(f"{summary}, {time.monotonic() - start_time:.1f} s | {output}")


@contextlib.contextmanager
def _unfinished_folder(output: Path) -> Iterator[Path]:
    """Yield a folder for the files of a training, next to the output; it is removed at the end.

    Raises:
        ConfigError: A file in one of the folders cannot be written.
    """
    host, process_id = socket.gethostname(), os.getpid()
    folder = output.parent / f".{output.name}.{host}.{process_id}.unfinished"
    try:
        _remove_leftovers(output)
        folder.mkdir(parents=True)
        yield folder
    except OSError as error:
        raise ConfigError(
            f"--output_dir {output} cannot be written: {error.strerror or error}."
        ) from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _check_inputs_outside(output: Path, input_files: Sequence[Path]) -> None:
    """Refuse texts in the folder that the tokenizer would replace."""
    for path in input_files:
        if path.resolve().is_relative_to(output.resolve()):
            raise ConfigError(
                f"--input {path} is in --output_dir {output}, which would replace it; name another "
                "folder."
            )


def _publish_folder(temporary_folder: Path, output: Path) -> None:
    """Rename a finished folder to its final name, and remove the one that it replaces."""
    replaced_folder = temporary_folder.with_suffix(".replaced")
    if output.exists():
        output.rename(replaced_folder)
    temporary_folder.rename(output)
    if replaced_folder.is_dir():
        shutil.rmtree(replaced_folder)


def _remove_leftovers(output: Path) -> None:
    """Remove the folders of trainings on this machine that were killed."""
    name, host = re.escape(output.name), re.escape(socket.gethostname())
    for path in output.parent.glob(".*"):
        leftover = re.fullmatch(rf"\.{name}\.{host}\.(\d+)\.(unfinished|replaced)", path.name)
        if leftover is None:
            continue
        try:
            os.kill(int(leftover[1]), 0)
        except ProcessLookupError:
            delete(path)
        except PermissionError:  # another user's process
            pass


def check_options(options: TrainTokenizerOptions) -> None:
    """Refuse options that cannot work, before any text is read.

    Raises:
        ConfigError: Names the option and what to do.
    """
    if not options.input:
        raise ConfigError("No text is named: give files, patterns or folders with --input.")
    if options.output_dir is None:
        raise ConfigError("No output is named: give the folder to write with --output_dir.")
    check_output_folder(Path(options.output_dir), overwrite=options.overwrite)
    if options.normalization in _MISSING_NORMALIZATIONS[options.library]:
        raise ConfigError(
            f"--library {options.library} has no --normalization {options.normalization}; "
            "see --help for those that it has."
        )
    if options.library == "sentencepiece":
        return
    if conflicting_options := list(_non_default_options(options, _SENTENCEPIECE_OPTIONS)):
        raise ConfigError(
            f"--{conflicting_options[0]} is for --library sentencepiece alone; leave it out."
        )
    if options.vocab_size <= NUM_BYTES:
        raise ConfigError(
            f"--vocab_size {options.vocab_size} is too small: the {NUM_BYTES} bytes and "
            f"{END_OF_TEXT} need {NUM_BYTES + 1}."
        )


def check_output_folder(output: Path, *, overwrite: bool) -> None:
    """Refuse a folder that exists, unless it is a tokenizer from here and may be replaced.

    Raises:
        ConfigError: Says what to do.
    """
    if not output.exists():
        return
    if output.is_dir():
        other_files = sorted({path.name for path in output.iterdir()} - _TOKENIZER_FILES)
    else:
        other_files = [output.name]
    if other_files:
        raise ConfigError(
            f"--output_dir {output} holds more than a tokenizer from here ({other_files[0]}), so "
            "--overwrite does not replace it; name another folder."
        )
    if not overwrite:
        raise ConfigError(f"--output_dir {output} exists already; pass --overwrite to replace it.")


def _non_default_options(options: TrainTokenizerOptions, names: Sequence[str]) -> dict[str, Any]:
    """Return the values of the named options that are set, by name."""
    values = {name: getattr(options, name) for name in names}
    return {
        name: value for name, value in values.items() if value is not None and value is not False
    }


def _write_tokenizer(
    options: TrainTokenizerOptions, texts: TrainingTexts, num_threads: int, folder: Path
) -> None:
    """Train the tokenizer, and write its files to the folder."""
    backend, special_tokens = _train_backend(options, texts, num_threads, folder)
    # Tokenizer.save does not say why a file cannot be written.
    (folder / "tokenizer.json").write_text(backend.to_str(pretty=True), encoding="utf-8")
    # This name of the class is known to all versions of transformers.
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **special_tokens}
    config_text = json.dumps({**config, "clean_up_tokenization_spaces": False}, indent=2)
    (folder / "tokenizer_config.json").write_text(config_text + "\n", encoding="utf-8")


def _train_backend(
    options: TrainTokenizerOptions, texts: TrainingTexts, num_threads: int, folder: Path
) -> tuple[Any, dict[str, str]]:
    """Train the tokenizer; return its backend, and its special tokens by their role.

    A SentencePiece model is written to the folder.
    """
    trainer_options = {
        **_non_default_options(options, (*_COMMON_OPTIONS, *_SENTENCEPIECE_OPTIONS)),
        "num_threads": num_threads,
    }
    if options.library == "huggingface":
        backend = train_huggingface(texts, **trainer_options)
        special_tokens = {"bos_token": END_OF_TEXT, "eos_token": END_OF_TEXT}
    else:
        file = folder / "tokenizer.model"
        file.write_bytes(train_sentencepiece(texts, **trainer_options))
        model = convert_sentencepiece(file, samples=texts.sample, subject="The trained model")
        backend, special_tokens = model.backend, model.special_tokens
    return backend, special_tokens


def _describe_result(folder: Path, texts: TrainingTexts) -> str:
    """Describe text and tokenizer in a line; the tokenizer is loaded as its users load it."""
    tokenizer = load_text_tokenizer(TokenizerOptions(tokenizer_name=str(folder)))
    assert tokenizer.backend is not None
    encodings = tokenizer.backend.encode_batch(texts.sample, add_special_tokens=False)
    num_tokens = sum(len(encoding.ids) for encoding in encodings)
    num_bytes = sum(len(text.encode()) for text in texts.sample)
    return (
        f"{counted(texts.num_documents, 'document')}, {texts.num_bytes / 1e6:,.1f} MB of text | "
        f"{tokenizer.size:,} tokens, {num_bytes / num_tokens:.2f} bytes each on a sample"
    )
