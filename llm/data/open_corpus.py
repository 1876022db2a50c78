"""Open the corpus that the data options name: existing token files, or text, tokenized first."""

import logging
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from llm.data.blend import DEFAULT_SPLIT, parse_blend, parse_split
from llm.data.cache import TokenCache
from llm.data.corpus import Corpus, CorpusSource, TokenStream, vocabulary_error
from llm.data.dataset_folder import open_dataset_folder
from llm.data.formats.flat import AnyTokenFile, FlatTokenFile
from llm.data.formats.megatron import TokenFile, read_row_bytes, token_dtype
from llm.data.formats.sidecar import (
    TokenFileDescription,
    check_prepend_bos,
    check_tokenizer,
    describe_token_files,
    open_described_files,
)
from llm.data.options import DataOptions
from llm.data.order import DocumentBoundaries, MixtureStage
from llm.data.splits import split_documents, split_rows
from llm.data.text_identity import kind_of
from llm.data.text_to_tokens import Text, TextEncoding
from llm.data.workers import limit_workers
from llm.errors import DataError
from llm.runtime.agreement import on_rank0
from llm.runtime.logging import SAME_ON_ALL_RANKS
from llm.tokenizers.load_tokenizer import (
    choose_begin_token,
    choose_end_token,
    compute_fingerprint,
    count_ids,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_MAX_CHECKED_DOCUMENTS = 100
_MAX_CHECKED_TOKENS = 1 << 20

BlendWords = Sequence[float | str]

logger = logging.getLogger("llm.data")


def open_corpus(
    options: DataOptions,
    *,
    tokenizer: "PreTrainedTokenizerBase",
    vocab_size: int,
    document_boundaries: DocumentBoundaries | None,
    trust_remote_code: bool,
) -> Corpus:
    """Open training and validation tokens; text is made into token files in the cache first.

    Args:
        options: Which tokens or texts, and how they are split.
        tokenizer: Makes tokens of texts; token files must have been made with it.
        vocab_size: Vocabulary of the tokenizer or the model, whichever is larger.
        document_boundaries: How to keep documents apart; every document must end with its token.
        trust_remote_code: Whether to run code that comes with a data set.

    Raises:
        ConfigError: The options make no blend or no split.
        DataError: The data is missing, damaged, from another tokenizer, or too small for the split.
    """
    opener = _CorpusOpener(
        options=options,
        tokenizer_fingerprint=compute_fingerprint(tokenizer),
        vocab_size=vocab_size,
        document_boundaries=document_boundaries,
    )
    corpus = opener.open_token_files()
    if corpus is not None:
        return corpus
    train, validation = _prepare_texts(options, tokenizer, vocab_size, trust_remote_code)
    if train is not None and validation is None and options.validation_split_percentage > 0:
        corpus = opener.open_split_rows(train)
    else:
        files = [() if prefix is None else (str(prefix),) for prefix in (train, validation)]
        corpus = opener.open_unsplit(*files)
    # Sources of text have the name of the text, not of the token files in the cache.
    text_name = _name_of_text(options)
    return replace(corpus, train=tuple(replace(source, name=text_name) for source in corpus.train))


def open_planned_corpus(options: DataOptions) -> Corpus | None:
    """Open the token files of a run that is only planned; None if it reads text.

    They are compared neither with a tokenizer nor with a vocabulary.

    Raises:
        ConfigError: The options make no blend or no split.
        DataError: The files are missing, damaged, or too small for the split.
    """
    opener = _CorpusOpener(
        options=options, tokenizer_fingerprint=None, vocab_size=None, document_boundaries=None
    )
    return opener.open_token_files()


def _name_of_text(options: DataOptions) -> str:
    """Return the name of the training text: of its file without suffixes, or of its data set."""
    if options.train_file:
        return Path(options.train_file).resolve().name.partition(".")[0]
    return Path(options.dataset_name or "").resolve().name


def _prepare_texts(
    options: DataOptions,
    tokenizer: "PreTrainedTokenizerBase",
    vocab_size: int,
    trust_remote_code: bool,
) -> tuple[Path | None, Path | None]:
    """Return the cached token files of the texts for training and evaluation."""
    folder = options.data_cache_dir or os.environ.get("LLM_CACHE_DIR") or "~/.cache/llm"
    cache = TokenCache(folder=Path(folder).expanduser(), overwrite=options.overwrite_cache)
    num_tokenizer_ids = count_ids(getattr(tokenizer, "backend_tokenizer", None), len(tokenizer))
    encoding = TextEncoding(
        tokenizer=tokenizer,
        fingerprint=compute_fingerprint(tokenizer),
        size=num_tokenizer_ids,
        end_token=choose_end_token(tokenizer.eos_token_id, options.append_eos),
        begin_token=choose_begin_token(tokenizer.bos_token_id, options.prepend_bos),
        dtype=token_dtype(max(vocab_size, num_tokenizer_ids)).name,
    )
    workers = limit_workers(options.preprocessing_num_workers)
    text_by_split = _make_texts_by_split(options, trust_remote_code)
    # The files of all texts are checked before the first text is tokenized.
    stamps_by_split = {split: text.stamp_files() for split, text in text_by_split.items()}
    prefix_by_split = {}
    for split, text in text_by_split.items():
        stamps = stamps_by_split[split]
        write_files = partial(encoding.write_token_files, text, stamps, workers=workers)
        prefix_by_split[split] = cache.get_or_prepare(
            encoding.compute_key(text, stamps), write_files
        )
    return prefix_by_split.get("train"), prefix_by_split.get("validation")


def _make_texts_by_split(options: DataOptions, trust_remote_code: bool) -> dict[str, Text]:
    """Return the texts for training and evaluation, by the name of their split."""
    make_text = partial(
        Text,
        text_column=options.text_column,
        keep_linebreaks=not options.no_keep_linebreaks,
        trust_remote_code=trust_remote_code,
    )
    text_by_split: dict[str, Text] = {}
    if options.dataset_name is not None:
        text_by_split = _make_dataset_texts(
            options.dataset_name, options.dataset_config_name, make_text
        )
    for split, name in (("train", options.train_file), ("validation", options.validation_file)):
        if name is not None:
            text_by_split[split] = make_text(name=name, option=f"--{split}_file", paths=(name,))
    if options.text_column is not None:
        paths = [path for text in text_by_split.values() for path in text.paths]
        _warn_of_plain_text(paths, options.text_column)
    return text_by_split


def _warn_of_plain_text(paths: Sequence[str], text_column: str) -> None:
    """Warn that `--text_column` has no effect on the first plain text file, if there is one."""
    plain_text = next((path for path in paths if kind_of(Path(path)) == ".txt"), None)
    if plain_text is not None:
        logger.warning(
            f"--text_column {text_column} has no effect on {plain_text}: a text has no columns",
            extra=SAME_ON_ALL_RANKS,
        )


def _make_dataset_texts(
    dataset_name: str, config_name: str | None, make_text: Callable[..., Text]
) -> dict[str, Text]:
    """Return the texts of a data set, by the name of their split."""
    option = "--dataset_name"
    folder = open_dataset_folder(dataset_name, config_name, file_option="--train_file")
    if folder is None:
        return {
            split: make_text(name=dataset_name, option=option, split=split, config_name=config_name)
            for split in ("train", "validation")
        }
    paths_by_split = {
        "train": folder.list_files("train"),
        "validation": folder.splits.get("validation", ()),
    }
    return {
        split: make_text(
            name=f"{dataset_name} [{split}]",
            option=option,
            paths=tuple(map(str, paths_by_split[split])),
        )
        for split in paths_by_split
        if paths_by_split[split]
    }


@dataclass(frozen=True, slots=True)
class _CorpusOpener:
    """Opens token files that fit a run.

    Attributes:
        options: As in `open_corpus`.
        tokenizer_fingerprint: Fingerprint of its tokenizer; None if any tokenizer may have made
            the files.
        vocab_size: As in `open_corpus`; None for any ids.
        document_boundaries: As in `open_corpus`.
    """

    options: DataOptions
    tokenizer_fingerprint: str | None
    vocab_size: int | None
    document_boundaries: DocumentBoundaries | None

    def open_token_files(self) -> Corpus | None:
        """Open the token files that the options name; None if they name text."""
        if self.options.data_stage:
            return self._open_stages()
        if self.options.data_path:
            return self._split_sources(self._open_sources(self.options.data_path, "--data_path"))
        if self.options.train_data_path or self.options.valid_data_path:
            return self.open_unsplit(self.options.train_data_path, self.options.valid_data_path)
        return None

    def _open_stages(self) -> Corpus:
        """Open the files of all stages; a file that appears in several stages is one source.

        They are split by `split`, or taken whole if `valid_data_path` names other files.
        """
        source_by_file, weights_by_stage = self._open_stage_sources()
        stages = tuple(
            MixtureStage(stage.until, tuple(weight_by_file[file] for file in source_by_file))
            for stage, weight_by_file in zip(self.options.data_stage, weights_by_stage, strict=True)
        )
        names = _shorten_paths([source.stream.file.prefix for source in source_by_file.values()])
        sources = []
        for source_index, source in enumerate(source_by_file.values()):
            # The mean over the stages, so that the weights of the validation losses are constant.
            mean_weight = sum(stage.weights[source_index] for stage in stages) / len(stages)
            sources.append(replace(source, name=names[source_index], weight=mean_weight))
        if self.options.valid_data_path:
            corpus = self.open_unsplit(train=(), validation=self.options.valid_data_path)
            return replace(corpus, train=tuple(sources), stages=stages)
        return replace(self._split_sources(sources), stages=stages)

    def _open_stage_sources(
        self,
    ) -> tuple[dict[Path, CorpusSource], list[defaultdict[Path, float]]]:
        """Open the files of all stages.

        Returns:
            The source of each file by its real path, in order of appearance; and for each stage the
            weight of each file, 0 for files of other stages.
        """
        source_by_file: dict[Path, CorpusSource] = {}
        weights_by_stage: list[defaultdict[Path, float]] = []
        for stage_number, stage in enumerate(self.options.data_stage, start=1):
            option = f"data_stage {stage_number}: data_path"
            weight_by_file: defaultdict[Path, float] = defaultdict(float)
            for source in self._open_sources(stage.data_path, option):
                file = source.stream.file.prefix.resolve()
                source_by_file.setdefault(file, source)
                weight_by_file[file] += source.weight
            weights_by_stage.append(weight_by_file)
        return source_by_file, weights_by_stage

    def _split_sources(self, unsplit_sources: Sequence[CorpusSource]) -> Corpus:
        """Split each file into training and validation, by the fractions of `split`."""
        if self.options.split is None:
            fractions, split_text = parse_split(DEFAULT_SPLIT), f"{DEFAULT_SPLIT} (the default)"
        else:
            fractions, split_text = parse_split(self.options.split), self.options.split
        train: list[CorpusSource] = []
        validation: list[CorpusSource] = []
        for source in unsplit_sources:
            if source.weight == 0:
                # A source of weight 0 keeps its number in the blend: the numbers are part of the
                # keys of the orders.
                train.append(source)
                continue
            streams = split_documents(
                source.stream.file, fractions, text=split_text, vocab_size=self.vocab_size
            )
            for stream, split_sources in zip(streams, (train, validation), strict=True):
                if stream is not None:
                    split_sources.append(replace(source, stream=stream))
        return Corpus(train=tuple(train) if fractions[0] > 0 else (), validation=tuple(validation))

    def open_unsplit(self, train: BlendWords, validation: BlendWords) -> Corpus:
        """Open files to train on and others to evaluate on."""
        train_sources = self._open_sources(train, "--train_data_path")
        validation_sources = self._open_sources(validation, "--valid_data_path")
        return Corpus(
            train=tuple(train_sources),
            validation=tuple(source for source in validation_sources if source.weight > 0),
        )

    def open_split_rows(self, prefix: Path) -> Corpus:
        """Open cached token files, and split off `validation_split_percentage` of their rows."""
        (source,) = self._open_sources((str(prefix),), "--train_file")
        assert isinstance(source.stream.file, TokenFile)  # the cache holds no other kind
        train, validation = split_rows(
            source.stream.file,
            read_row_bytes(prefix),
            self.options.validation_split_percentage,
            vocab_size=self.vocab_size,
        )
        return Corpus(
            train=(replace(source, stream=train),),
            validation=(replace(source, stream=validation),),
        )

    def _open_sources(self, blend: BlendWords, option: str) -> list[CorpusSource]:
        """Open and check the token files of one option, whole, and normalize their weights."""
        if not blend:
            return []
        paths, blend_weights = parse_blend(blend, option=option)
        for path, count in Counter(paths).items():
            if count > 1:
                line = f"{option} names {path} {count} times, and each counts as a source"
                logger.warning(line, extra=SAME_ON_ALL_RANKS)
        # By one rank: thousands of ranks would list the folder and read the sidecar of each file.
        descriptions = on_rank0(lambda: [describe_token_files(path) for path in paths])
        sources = [
            self._open_source(name, path.parent, description)
            for name, path, description in zip(
                _shorten_paths(paths), paths, descriptions, strict=True
            )
        ]
        weights = blend_weights or [float(source.stream.num_tokens) for source in sources]
        weight_sum = sum(weights)
        return [
            replace(source, weight=weight / weight_sum)
            for source, weight in zip(sources, weights, strict=True)
        ]

    def _open_source(
        self, name: str, folder: Path, description: TokenFileDescription
    ) -> CorpusSource:
        """Open a source, of weight 1, and compare it with the tokenizer and the model."""
        file, sidecar = open_described_files(folder, description)
        if file.num_tokens == 0:
            raise DataError(f"The token file {file.prefix}.bin holds no tokens; prepare it again.")
        if sidecar is not None:
            if self.tokenizer_fingerprint is not None:
                check_tokenizer(
                    file.prefix,
                    sidecar,
                    self.tokenizer_fingerprint,
                    self.options.ignore_tokenizer_mismatch,
                )
            check_prepend_bos(file.prefix, sidecar, self.options.prepend_bos)
            if self.vocab_size is not None and sidecar.largest_token >= self.vocab_size:
                raise vocabulary_error(file.prefix, sidecar.largest_token, self.vocab_size)
        if self.document_boundaries is not None:
            check_document_ends(file, self.document_boundaries.eos_token_id)
        num_bytes = None if sidecar is None else sidecar.text_bytes
        stream = TokenStream(file, num_bytes=num_bytes, vocab_size=self.vocab_size)
        return CorpusSource(name, 1.0, stream, sidecar)


def check_document_ends(file: AnyTokenFile, eos_token_id: int) -> None:
    """Refuse token files without a document that ends with the end-of-text token.

    Args:
        file: The token file.
        eos_token_id: The token that should end documents.

    Raises:
        DataError: None of the first documents ends with it; or, if document boundaries are not
            known, it is not among the first million tokens.
    """
    if not isinstance(file, FlatTokenFile):
        num_checked = min(_MAX_CHECKED_DOCUMENTS, file.num_documents)
        document_ends = file.find_document_starts(1, num_checked + 1)
        checked_tokens = file.tokens.take(document_ends[document_ends > 0] - 1)
        fault = f"none of its first {num_checked} documents ends with the id {eos_token_id}"
    else:
        checked_tokens = file.tokens[:_MAX_CHECKED_TOKENS]
        fault = f"the id {eos_token_id} is not among its first {checked_tokens.size:,} tokens"
    if not (checked_tokens == eos_token_id).any():
        raise DataError(
            "--reset_position_ids and --reset_attention_mask need documents that end with the "
            f"tokenizer's end-of-text token, and {file.prefix} has none: {fault}. Prepare it again "
            "with --append_eod, or leave the two options out."
        )


def _shorten_paths(paths: Sequence[Path]) -> list[str]:
    """Return the shortest path endings that tell the files apart."""
    for num_parts in range(1, 1 + max(len(path.parts) for path in paths)):
        names = [Path(*path.parts[-num_parts:]).as_posix() for path in paths]
        if len(set(names)) == len(names):
            return names
    # The same file was given twice.
    return [f"{path_index}-{path.name}" for path_index, path in enumerate(paths)]
