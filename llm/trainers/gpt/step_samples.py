"""The samples of a training step: recorded by each start, and found from the run's folder alone."""

import os
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from llm.checkpoint.load import list_checkpoints
from llm.checkpoint.run_folder import RunFolder
from llm.config.duration import Duration
from llm.data.batch_plan import BatchPlan, plan_batches
from llm.data.corpus import Corpus, CorpusSource, Samples, TokenStream
from llm.data.data_digest import compute_corpus_digests, data_has_changed
from llm.data.formats.flat import FlatTokenFile
from llm.data.formats.megatron import TokenFile, set_read_ahead
from llm.data.formats.parts import TokenFileParts, arrays_of
from llm.errors import CheckpointError, ConfigError, DataError
from llm.models.configuration import load_config
from llm.runtime.files import read_json_lines
from llm.runtime.logging import counted
from llm.trainers.gpt.config import CoreConfig
from llm.trainers.gpt.inputs import choose_block_size, open_data
from llm.trainers.gpt.load_trained_model import (
    load_run_tokenizer,
    read_while_training,
    use_checkpoint_copies,
)
from llm.trainers.gpt.recorded_config import read_config
from llm.trainers.gpt.training_run import TrainingRun, choose_skipped_samples

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

_ORDER_OPTIONS = ("seed", "block_size", "per_device_train_batch_size", "global_batch_size")
"""Options that determine the order of samples, and that a resume may have changed."""

_START_FIELDS: dict[str, tuple[type, ...]] = {
    "step": (int,),
    "seed": (int,),
    "block_size": (int,),
    "per_device_train_batch_size": (int,),
    "global_batch_size": (int, str),
    "total_samples": (int,),
    "data_ranks": (int,),
    "data": (dict,),
}
"""Types of the fields that determine the order of samples after a start."""


def describe_sample_order(run: TrainingRun) -> dict[str, object]:
    """Return the settings that determine a rank's samples in each step, for the log of a start."""
    return {
        "seed": run.seed,
        "block_size": run.block_size,
        "per_device_train_batch_size": run.config.per_device_train_batch_size,
        "global_batch_size": run.batch_plan.format_batch_schedule(run.block_size),
        "total_samples": run.batch_plan.total_samples,
        "data_ranks": run.batch_plan.world_size,
        "data": run.data_digest,
    }


@dataclass(frozen=True, kw_only=True)
class StepSamples:
    """The samples of a step, or of one rank in it.

    Attributes:
        total_steps: Steps of the run.
        data_ranks: Number of ranks that shared the step's samples.
        samples: Their indices, int64 [num_samples].
        sources: The source of each, a place in `corpus`, int64 [num_samples].
        starts: Position of each one's first token in its source's stream, int64 [num_samples].
        num_tokens: Tokens of a sample, including the last label.
        corpus: The sources of the training split.
        tokenizer: The run's tokenizer.
    """

    total_steps: int
    data_ranks: int
    samples: NDArray[np.int64]
    sources: NDArray[np.int64]
    starts: NDArray[np.int64]
    num_tokens: int
    corpus: tuple[CorpusSource, ...]
    tokenizer: "PreTrainedTokenizerBase"


def find_step_samples(
    run: Path,
    step: int,
    *,
    rank: int | None,
    data_ranks: int | None,
    trust_remote_code: bool = False,
) -> StepSamples:
    """Find the samples of a step; reads only parts of the token files.

    Args:
        run: Folder of a run, finished or not.
        step: Number of the step, counted from 1.
        rank: Return only this data-parallel rank's samples; None for all ranks.
        data_ranks: Number of data-parallel ranks; None for the number when the step was trained.
        trust_remote_code: Whether the Python code of the run's model and data set may run.

    Raises:
        LLMError: The run, step or rank does not exist, or the data are missing or have changed.
    """
    recorded_config = read_config(run, trust_remote_code=trust_remote_code)
    order = _read_recorded_order(RunFolder(run), step, recorded_config)
    config = _with_order_options(recorded_config, order)
    tokenizer, model_config = _read_tokenizer_and_model_config(config, RunFolder(run).checkpoints)
    corpus = open_data(config, model_config, tokenizer, None)
    if data_has_changed(order["data"], compute_corpus_digests(corpus.train)):
        raise DataError(
            f"The training data that {run / 'config.toml'} names are no longer those that step "
            f"{step} was trained on; restore them."
        )
    _turn_off_read_ahead(corpus)
    block_size = choose_block_size(config, model_config)
    samples = Samples(
        corpus.train, stages=corpus.stages, block_size=block_size, seed=config.seed or 0
    )
    batch_plan = plan_batches(
        config,
        num_windows=samples.num_windows,
        world_size=data_ranks or order["data_ranks"],
        block_size=block_size,
    )
    positions = _choose_positions(batch_plan, step, rank)
    sample_indices = choose_skipped_samples(config, None, batch_plan).sample_indices(positions)
    sources, starts = samples.locate(sample_indices)
    return StepSamples(
        total_steps=batch_plan.total_steps,
        data_ranks=batch_plan.world_size,
        samples=sample_indices,
        sources=sources,
        starts=starts,
        num_tokens=block_size + 1,
        corpus=corpus.train,
        tokenizer=tokenizer,
    )


def _turn_off_read_ahead(corpus: Corpus) -> None:
    """Let the kernel read only the pages of the training tokens that are used."""
    for source in corpus.train:
        for array in arrays_of(source.stream.tokens):
            set_read_ahead(array, on=False)


def _with_order_options(config: CoreConfig, order: dict[str, Any]) -> CoreConfig:
    """Return the options of a run with those that determined the order of samples at a start."""
    order_options: dict[str, Any] = {name: order[name] for name in _ORDER_OPTIONS}
    # Replaces other length options, and a cooldown.
    order_options["max_duration"] = Duration(f"{order['total_samples']} samples")
    return replace(config, **order_options)


def _read_tokenizer_and_model_config(
    config: CoreConfig, checkpoints: Path
) -> "tuple[PreTrainedTokenizerBase, PreTrainedConfig]":
    """Return tokenizer and model configuration: the newest checkpoint's copies, if there is one."""

    def read() -> "tuple[PreTrainedTokenizerBase, PreTrainedConfig]":
        source_options, valid_checkpoints = config, list_checkpoints(checkpoints)
        if valid_checkpoints:
            source_options = use_checkpoint_copies(config, valid_checkpoints[-1])
        return load_run_tokenizer(source_options), load_config(source_options)

    return read_while_training(checkpoints, read)


def _choose_positions(batch_plan: BatchPlan, step: int, rank: int | None) -> NDArray[np.int64]:
    """Return the positions of a step, or of a rank in it.

    Raises:
        ConfigError: The step or rank does not exist.
    """
    if step > batch_plan.total_steps:
        raise ConfigError(
            f"--step {step} is beyond the run, which has {batch_plan.total_steps:,} steps."
        )
    if rank is None:
        return np.arange(*batch_plan.step_positions(step - 1), dtype=np.int64)
    if rank >= batch_plan.world_size:
        raise ConfigError(
            f"--rank {rank} does not exist: step {step} has "
            f"{counted(batch_plan.world_size, 'data-parallel rank')}, counted from 0 "
            "(--data_ranks)."
        )
    positions = batch_plan.rank_positions(step - 1, rank).reshape(-1)
    return positions[positions >= 0]


def _read_recorded_order(folder: RunFolder, step: int, config: CoreConfig) -> dict[str, Any]:
    """Return the sample order logged by the last start that trained the step, counted from 1.

    Raises:
        DataError: No start before the step is recorded, or the record of a start is damaged.
    """
    starts = [
        start for run_folder in _list_lineage(folder, config) for start in _read_starts(run_folder)
    ]
    earlier_starts = [start for start in starts if start["step"] < step]
    if not earlier_starts:
        raise DataError(
            f"{folder.events} records no start of the run, so the order of its samples is unknown; "
            "copy the file back."
        )
    # The last start may have made the run longer.
    return earlier_starts[-1] | {"total_samples": starts[-1]["total_samples"]}


def _list_lineage(folder: RunFolder, config: CoreConfig) -> list[RunFolder]:
    """Return the folders of a run and its parents, the oldest first, as far as they exist."""
    lineage = [folder]
    while config.branch_from is not None:
        parent = Path(os.path.realpath(config.branch_from)).parent.parent  # of checkpoints/step_N
        if any(parent == Path(os.path.realpath(child.path)) for child in lineage):
            break
        try:
            config = read_config(parent)
        except (CheckpointError, ConfigError):  # it may have gone
            break
        lineage.insert(0, RunFolder(parent))
    return lineage


def _read_starts(folder: RunFolder) -> list[dict[str, Any]]:
    """Return the logged starts of a run.

    Raises:
        DataError: A start lacks a field, or has a value in it that no run records.
    """
    lines = read_json_lines(folder.events)
    starts = [line for line in lines if line is not None and line.get("event") == "start"]
    for start in starts:
        for name in _START_FIELDS:
            value = start.get(name)
            if not _is_valid_field(name, value):
                raise DataError(
                    f"{folder.events} is damaged: a start has the {name} {repr(value)[:40]}; copy "
                    "the file back."
                )
    return starts


def _is_valid_field(name: str, value: object) -> bool:
    """Return whether a run can record this value of a field in `_START_FIELDS`."""
    if type(value) not in _START_FIELDS[name]:
        return False
    if not isinstance(value, int):
        return True
    if name == "seed":
        return value >= 0
    return (0 if name == "step" else 1) <= value < 2**62


class Passage(NamedTuple):
    """A piece of a sample within one document.

    Attributes:
        document: Number of the document in its token file; None if the file has no documents.
        offset: Position of the first token in the document, or in a file without documents.
        length: Tokens of the whole document, or of a file without documents.
        tokens: The tokens.
    """

    document: int | None
    offset: int
    length: int
    tokens: NDArray[Any]


def split_into_passages(stream: TokenStream, start: int, length: int) -> Iterator[Passage]:
    """Yield the passages of a sample.

    Args:
        stream: The sample's source.
        start: Position of its first token in the stream.
        length: Its tokens.

    Raises:
        DataError: The index is damaged.
    """
    num_remaining = length
    while num_remaining > 0:
        start %= stream.num_tokens  # the stream is a ring
        end = min(start + num_remaining, stream.num_tokens)
        if isinstance(stream.file, FlatTokenFile):
            first_token = stream.first_byte // stream.tokens.itemsize  # of the stream in the file
            yield Passage(
                None,
                offset=first_token + start,
                length=stream.file.num_tokens,
                tokens=np.asarray(stream.tokens[start:end]),
            )
        else:
            yield from _split_at_documents(stream, stream.file, start, end)
        num_remaining -= end - start
        start = end


def _split_at_documents(
    stream: TokenStream, file: TokenFile | TokenFileParts, start: int, end: int
) -> Iterator[Passage]:
    """Yield the passages in a range of a stream, which does not wrap around.

    Raises:
        DataError: The index is damaged.
    """
    first_token = stream.first_byte // stream.tokens.itemsize  # of the stream in the file
    # Documents without tokens begin at the same place; the search finds the last of them.
    documents = range(file.num_documents)
    document = bisect_right(documents, first_token + start, key=file.document_start) - 1
    while start < end:
        document_start = file.document_start(document)
        document_end = file.document_start(document + 1)
        if not document_start <= first_token + start <= document_end:
            raise DataError(
                f"The token file {file.prefix}.idx has documents out of order near number "
                f"{document:,}; it is damaged."
            )
        passage_end = min(end, document_end - first_token)
        if passage_end > start:
            yield Passage(
                document,
                offset=first_token + start - document_start,
                length=document_end - document_start,
                tokens=np.asarray(stream.tokens[start:passage_end]),
            )
        start, document = passage_end, document + 1
