"""A corpus of token files: a run's own of its text, prepared ones, Megatron's, nanoGPT's."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from llm.data.corpus import Corpus, CorpusPart, whole
from llm.data.documents import check_document_ends
from llm.data.formats.flat import FlatTokenFile
from llm.data.formats.megatron import TokenFile, open_token_file
from llm.data.formats.sidecar import check_tokenizer, read_sidecar
from llm.data.preparation.output_files import read_row_bytes
from llm.data.splits import DEFAULT_SPLIT, WeightedPath, cut, cut_rows, parse_blend, parse_split
from llm.errors import DataError

log = logging.getLogger("llm.data")

Words = Sequence[float | str]


@dataclass(frozen=True, slots=True)
class _Opened:
    """A source of a blend: its file and its weight, normalised."""

    file: TokenFile | FlatTokenFile
    name: str
    weight: float
    text_bytes: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenFileChecks:
    """What token files must fit to.

    Attributes:
        tokenizer_fingerprint: Of the tokenizer that the run uses.
        force: Whether to take files that another tokenizer made.
        vocab_size: Of tokenizer and model, whichever is larger.
        eos_token_id: The token that must end documents; None where it does not matter.
    """

    tokenizer_fingerprint: str
    force: bool
    vocab_size: int
    eos_token_id: int | None


def open_token_corpus(
    *,
    data_path: Words,
    train_data_path: Words,
    valid_data_path: Words,
    split: str | None,
    checks: TokenFileChecks,
) -> Corpus:
    """Opens token files, alone or as blends; the names are those of the trainer's options.

    Args:
        data_path: Prefixes, alone or each after its weight; `split` cuts each of them.
        train_data_path: The same, to train on, taken whole.
        valid_data_path: The same, to evaluate on, taken whole.
        split: Parts for training, validation and testing; None is Megatron-LM's default.
        checks: What the files must fit to.

    Raises:
        ConfigError: The options make no blend or no split.
        DataError: A file is missing, damaged, of another tokenizer, or too small for the split.
    """
    if not data_path:
        train = _open_all(train_data_path, "--train_data_path", checks)
        validation = _open_all(valid_data_path, "--valid_data_path", checks)
        size = checks.vocab_size
        return Corpus(
            train=tuple(_whole(source, size) for source in train),
            validation=tuple(_whole(source, size) for source in validation if source.weight > 0),
        )
    text = DEFAULT_SPLIT if split is None else split
    parts = parse_split(text)
    if split is None:
        text = f"{text} (the default)"
    train_parts: list[CorpusPart] = []
    validation_parts: list[CorpusPart] = []
    for source in _open_all(data_path, "--data_path", checks):
        if source.weight == 0:
            # It keeps its number in the blend, so that the order of the others stays.
            train_parts.append(_whole(source, checks.vocab_size))
            continue
        streams = cut(source.file, parts, text=text, vocab_size=checks.vocab_size)
        for stream, found in zip(streams, (train_parts, validation_parts), strict=True):
            if stream is not None:
                found.append(CorpusPart(source.name, source.weight, stream))
    return Corpus(
        train=tuple(train_parts) if parts[0] > 0 else (), validation=tuple(validation_parts)
    )


def open_text_corpus(
    *,
    train: Path | None,
    validation: Path | None,
    validation_split_percentage: float,
    checks: TokenFileChecks,
) -> Corpus:
    """Opens what `TokenCache` has made of text.

    Args:
        train: The token files to train on; or None.
        validation: Those to evaluate on, taken whole; None cuts them off `train`.
        validation_split_percentage: Of the rows of `train`; 0 leaves no validation.
        checks: What the files must fit to.

    Raises:
        DataError: They are damaged, do not fit, or are too small for the cut.
    """
    if train is None or validation is not None or validation_split_percentage == 0:
        return open_token_corpus(
            data_path=(),
            train_data_path=() if train is None else (str(train),),
            valid_data_path=() if validation is None else (str(validation),),
            split=None,
            checks=checks,
        )
    (source,) = _open_all((str(train),), "--train_file", checks)
    assert isinstance(source.file, TokenFile)  # the cache holds no others
    training, cut_off = cut_rows(
        source.file,
        read_row_bytes(train),
        validation_split_percentage,
        vocab_size=checks.vocab_size,
    )
    return Corpus(
        train=(CorpusPart(source.name, 1.0, training),),
        validation=(CorpusPart(source.name, 1.0, cut_off),),
    )


def _open_all(words: Words, option: str, checks: TokenFileChecks) -> list[_Opened]:
    """Opens the sources of one option, checks them, and normalises their weights."""
    if not words:
        return []
    asked = parse_blend(words, option=option)
    files = [open_token_file(source.prefix) for source in asked]
    text_bytes = [_check(file, checks) for file in files]
    weights = [
        float(file.num_tokens) if source.weight is None else source.weight
        for source, file in zip(asked, files, strict=True)
    ]
    total = sum(weights)
    return [
        _Opened(file, name, weight / total, num_bytes)
        for file, name, weight, num_bytes in zip(
            files, _names(asked), weights, text_bytes, strict=True
        )
    ]


def _check(file: TokenFile | FlatTokenFile, checks: TokenFileChecks) -> int | None:
    """Compares a file with the tokenizer and the model; returns its text's bytes, if known."""
    if file.num_tokens == 0:
        raise DataError(f"The token file {file.prefix}.bin holds no tokens; prepare it anew.")
    sidecar = read_sidecar(file.prefix)
    if sidecar is not None:
        check_tokenizer(file.prefix, sidecar, checks.tokenizer_fingerprint, checks.force)
        if sidecar.largest_token >= checks.vocab_size:
            raise DataError(
                f"{file.prefix}.bin holds the token id {sidecar.largest_token}, and the "
                f"vocabulary of tokenizer and model has {checks.vocab_size:,} tokens; train with "
                "the tokenizer that made the file."
            )
    if checks.eos_token_id is not None:
        check_document_ends(file, checks.eos_token_id)
    return None if sidecar is None else sidecar.text_bytes


def _whole(source: _Opened, vocab_size: int) -> CorpusPart:
    stream = whole(source.file, source.text_bytes, vocab_size=vocab_size)
    return CorpusPart(source.name, source.weight, stream)


def _names(sources: Sequence[WeightedPath]) -> list[str]:
    """The shortest ends of the paths that tell the sources apart."""
    paths = [source.prefix for source in sources]
    for length in range(1, 1 + max(len(path.parts) for path in paths)):
        names = [Path(*path.parts[-length:]).as_posix() for path in paths]
        if len(set(names)) == len(names):
            return names
    # The same file twice.
    return [f"{number}-{path.name}" for number, path in enumerate(paths)]
