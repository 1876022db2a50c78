"""Open the corpus that the data options name: existing token files, or text, tokenized first."""

import logging
import os
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from llm.data.cache import TokenCache
from llm.data.corpus import Corpus, CorpusSource, TokenStream, beyond_vocabulary
from llm.data.dataset_folder import open_dataset_folder
from llm.data.formats.flat import AnyTokenFile, FlatTokenFile
from llm.data.formats.megatron import TokenFile, read_row_bytes, token_dtype
from llm.data.formats.sidecar import check_beginnings, check_tokenizer, open_described
from llm.data.options import DataOptions
from llm.data.order import DocumentBoundaries, MixtureStage
from llm.data.splits import DEFAULT_SPLIT, parse_blend, parse_split, split_documents, split_rows
from llm.data.text_identity import kind_of
from llm.data.text_to_tokens import Text, TextEncoding
from llm.data.workers import bounded_workers
from llm.errors import DataError
from llm.tokenizers.load_tokenizer import begin_token, end_token, fingerprint, num_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_DOCUMENTS_CHECKED = 100
_TOKENS_CHECKED = 1 << 20

Words = Sequence[float | str]

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
    opener = _Opener(options, fingerprint(tokenizer), vocab_size, document_boundaries)
    if options.data_stage:
        return opener.open_stages()
    if options.data_path:
        return opener.open_split()
    if options.train_data_path or options.valid_data_path:
        return opener.open_whole(options.train_data_path, options.valid_data_path)
    train, validation = _prepare_texts(options, tokenizer, vocab_size, trust_remote_code)
    if train is not None and validation is None and options.validation_split_percentage > 0:
        corpus = opener.open_split_rows(train)
    else:
        files = [() if prefix is None else (str(prefix),) for prefix in (train, validation)]
        corpus = opener.open_whole(*files)
    # Not after the cache.
    name = Path(options.train_file or options.dataset_name or "").resolve().name
    name = name.partition(".")[0] if options.train_file else name
    return replace(corpus, train=tuple(replace(source, name=name) for source in corpus.train))


def _prepare_texts(
    options: DataOptions,
    tokenizer: "PreTrainedTokenizerBase",
    vocab_size: int,
    trust_remote_code: bool,
) -> tuple[Path | None, Path | None]:
    """Return the cached token files of the texts for training and evaluation."""
    folder = options.data_cache_dir or os.environ.get("LLM_CACHE_DIR") or "~/.cache/llm"
    cache = TokenCache(folder=Path(folder).expanduser(), overwrite=options.overwrite_cache)
    size = num_ids(getattr(tokenizer, "backend_tokenizer", None), len(tokenizer))
    encoding = TextEncoding(
        tokenizer=tokenizer,
        fingerprint=fingerprint(tokenizer),
        size=size,
        end_token=end_token(tokenizer.eos_token_id, options.append_eos),
        begin_token=begin_token(tokenizer.bos_token_id, options.prepend_bos),
        dtype=token_dtype(max(vocab_size, size)).name,
    )
    workers = bounded_workers(options.preprocessing_num_workers)
    texts = _texts_by_split(options, trust_remote_code)
    files = {split: text.files() for split, text in texts.items()}  # all are checked first
    train, validation = (
        cache.token_files(
            encoding.key(texts[split], files[split]),
            encoding.prepare(texts[split], files[split], workers=workers),
        )
        if split in texts
        else None
        for split in ("train", "validation")
    )
    return train, validation


def _texts_by_split(options: DataOptions, trust_remote_code: bool) -> dict[str, Text]:
    """Return the texts for training and evaluation, by the name of their split."""
    text = partial(
        Text,
        text_column=options.text_column,
        keep_linebreaks=not options.no_keep_linebreaks,
        trust_remote_code=trust_remote_code,
    )
    texts: dict[str, Text] = {}
    if options.dataset_name is not None:
        texts = _dataset_texts(options.dataset_name, options.dataset_config_name, text)
    for split, name in (("train", options.train_file), ("validation", options.validation_file)):
        if name is not None:
            texts[split] = text(name=name, option=f"--{split}_file", paths=(name,))
    paths = [path for split in texts for path in texts[split].paths]
    plain_text = next((path for path in paths if kind_of(Path(path)) == ".txt"), None)
    if plain_text is not None and options.text_column is not None:
        logger.warning(
            f"--text_column {options.text_column} has no effect on {plain_text}: a text has no "
            "columns"
        )
    return texts


def _dataset_texts(
    dataset_name: str, config_name: str | None, text: Callable[..., Text]
) -> dict[str, Text]:
    """Return the texts of a data set, by the name of their split."""
    option = "--dataset_name"
    folder = open_dataset_folder(dataset_name, config_name, file_option="--train_file")
    if folder is None:
        return {
            split: text(name=dataset_name, option=option, split=split, config_name=config_name)
            for split in ("train", "validation")
        }
    paths = {"train": folder.files("train"), "validation": folder.splits.get("validation", ())}
    return {
        split: text(
            name=f"{dataset_name} [{split}]", option=option, paths=tuple(map(str, paths[split]))
        )
        for split in paths
        if paths[split]
    }


@dataclass(frozen=True, slots=True)
class _Opener:
    """Opens token files that fit a run; for its attributes see `open_corpus`."""

    options: DataOptions
    tokenizer_fingerprint: str
    vocab_size: int
    document_boundaries: DocumentBoundaries | None

    def open_split(self) -> Corpus:
        """Open the files of `data_path` and split each of them by `split`."""
        return self._split_sources(self._open_sources(self.options.data_path, "--data_path"))

    def open_stages(self) -> Corpus:
        """Open the files of all stages; a file that appears in several stages is one source.

        They are split by `split`, or taken whole if `valid_data_path` names other files.
        """
        first: dict[Path, CorpusSource] = {}  # by the real path, in order of appearance
        blends: list[dict[Path, float]] = []
        for number, stage in enumerate(self.options.data_stage, start=1):
            blend: dict[Path, float] = defaultdict(float)
            for source in self._open_sources(stage.data_path, f"data_stage {number}: data_path"):
                file = source.stream.file.prefix.resolve()
                first.setdefault(file, source)
                blend[file] += source.weight
            blends.append(blend)
        stages = tuple(
            MixtureStage(stage.until, tuple(blend[file] for file in first))
            for stage, blend in zip(self.options.data_stage, blends, strict=True)
        )
        names = _shortest_names([source.stream.file.prefix for source in first.values()])
        # Means over the stages, so that the weights of the validation losses are constant.
        shares = zip(*(stage.weights for stage in stages), strict=True)
        sources = [
            replace(source, name=name, weight=sum(weights) / len(stages))
            for source, name, weights in zip(first.values(), names, shares, strict=True)
        ]
        if self.options.valid_data_path:
            corpus = self.open_whole((), self.options.valid_data_path)
            return replace(corpus, train=tuple(sources), stages=stages)
        return replace(self._split_sources(sources), stages=stages)

    def _split_sources(self, unsplit: Sequence[CorpusSource]) -> Corpus:
        """Split each file by `split`."""
        text = self.options.split
        split = parse_split(DEFAULT_SPLIT if text is None else text)
        text = f"{DEFAULT_SPLIT} (the default)" if text is None else text
        train: list[CorpusSource] = []
        validation: list[CorpusSource] = []
        for source in unsplit:
            if source.weight == 0:
                # It keeps its number in the blend, because the number keys the order of each
                # source.
                train.append(source)
                continue
            streams = split_documents(
                source.stream.file, split, text=text, vocab_size=self.vocab_size
            )
            for stream, sources in zip(streams, (train, validation), strict=True):
                if stream is not None:
                    sources.append(replace(source, stream=stream))
        return Corpus(train=tuple(train) if split[0] > 0 else (), validation=tuple(validation))

    def open_whole(self, train: Words, validation: Words) -> Corpus:
        """Open files to train on and others to evaluate on."""
        train_sources = self._open_sources(train, "--train_data_path")
        validation_sources = self._open_sources(validation, "--valid_data_path")
        return Corpus(
            train=tuple(train_sources),
            validation=tuple(source for source in validation_sources if source.weight > 0),
        )

    def open_split_rows(self, prefix: Path) -> Corpus:
        """Open a cached file and split off `validation_split_percentage` of its rows."""
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

    def _open_sources(self, blend: Words, option: str) -> list[CorpusSource]:
        """Open and check the token files of one option, whole, and normalize their weights."""
        if not blend:
            return []
        paths, weights = parse_blend(blend, option=option)
        streams = [self._open_file(path) for path in paths]
        weights = weights or [float(stream.num_tokens) for stream in streams]
        total = sum(weights)
        return [
            CorpusSource(name, weight / total, stream)
            for name, weight, stream in zip(_shortest_names(paths), weights, streams, strict=True)
        ]

    def _open_file(self, path: Path) -> TokenStream:
        """Open a token file and compare it with the tokenizer and the model."""
        file, sidecar = open_described(path)
        if file.num_tokens == 0:
            raise DataError(f"The token file {file.prefix}.bin holds no tokens; prepare it again.")
        if sidecar is not None:
            check_tokenizer(
                file.prefix,
                sidecar,
                self.tokenizer_fingerprint,
                self.options.ignore_tokenizer_mismatch,
            )
            check_beginnings(file.prefix, sidecar, self.options.prepend_bos)
            if sidecar.largest_token >= self.vocab_size:
                raise beyond_vocabulary(file.prefix, sidecar.largest_token, self.vocab_size)
        if self.document_boundaries is not None:
            check_document_ends(file, self.document_boundaries.eos_token_id)
        num_bytes = None if sidecar is None else sidecar.text_bytes
        return TokenStream(file, num_bytes=num_bytes, vocab_size=self.vocab_size)


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
        number = min(_DOCUMENTS_CHECKED, file.num_documents)
        ends = file.document_starts(1, number + 1)
        tokens = file.tokens.take(ends[ends > 0] - 1)
        fault = f"none of its first {number} documents ends with the id {eos_token_id}"
    else:
        tokens = file.tokens[:_TOKENS_CHECKED]
        fault = f"the id {eos_token_id} is not among its first {tokens.size:,} tokens"
    if not (tokens == eos_token_id).any():
        raise DataError(
            "--reset_position_ids and --reset_attention_mask need documents that end with the "
            f"tokenizer's end-of-text token, and {file.prefix} has none: {fault}. Prepare it again "
            "with --append_eod, or leave the two options out."
        )


def _shortest_names(paths: Sequence[Path]) -> list[str]:
    """Return the shortest path endings that tell the files apart."""
    for length in range(1, 1 + max(len(path.parts) for path in paths)):
        names = [Path(*path.parts[-length:]).as_posix() for path in paths]
        if len(set(names)) == len(names):
            return names
    # The same file was given twice.
    return [f"{number}-{path.name}" for number, path in enumerate(paths)]
