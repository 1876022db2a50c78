"""Options of the data: source, stages, order, batches, length of a run."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal

from llm.config.duration import Duration, Tokens
from llm.config.options import non_default, option, option_group
from llm.data.batch_schedule import parse_batch_schedule
from llm.data.blend import parse_blend, parse_split
from llm.data.skipped_samples import parse_skipped_ranges
from llm.errors import ConfigError

BATCH = "Batch"


@option_group("Stages of the data")
class DataStage:
    """One mixture stage, which begins when the previous one ends: one table `[[data_stage]]`."""

    until: Tokens | None = option(
        None, "Tokens of the run when the stage ends; none for the last stage."
    )
    data_path: tuple[float | str, ...] = option(
        (), "Its token files, in the notation of data_path.", path=True
    )


@option_group("Data", resume="fixed")
class DataOptions:
    """Options of the training and validation data."""

    dataset_name: str | None = option(
        None,
        "Data set on the Hub, or a folder of text files or from save_to_disk.",
        path=True,
    )
    dataset_config_name: str | None = option(
        None, "Configuration (subset) of dataset_name.", requires=("dataset_name",)
    )
    train_file: str | None = option(
        None, "Training text: a txt, json, jsonl, csv or parquet file.", path=True
    )
    validation_file: str | None = option(
        None, "Validation text: a file as for train_file.", path=True
    )
    data_path: tuple[float | str, ...] = option(
        (),
        "Token files to train and evaluate on, without .bin and .idx (nanoGPT's with .bin), each "
        "optionally after a weight.",
        path=True,
    )
    data_stage: tuple[DataStage, ...] = option(
        (),
        "Mixture stages: tables [[data_stage]] of the TOML file, each with data_path and (except "
        "the last) until, the run's tokens at its end.",
    )
    max_epochs: tuple[float | str, ...] = option(
        (),
        "Maximum epochs of each source: one number, or a number before the path of each limited "
        "source.",
        path=True,
        above=0,
        resume="free",
    )
    train_data_path: tuple[float | str, ...] = option(
        (), "Whole token files to train on.", path=True
    )
    valid_data_path: tuple[float | str, ...] = option(
        (), "Whole token files to evaluate on.", path=True
    )
    split: str | None = option(
        None,
        "Shares of each file's documents for training, validation and testing (not used), by "
        "default 969,30,1; 100,0,0 trains only.",
    )
    in_memory: bool = option(
        False,
        "Read the tokens into main memory, once per node.",
        resume="free",
    )
    reset_position_ids: bool = option(False, "Restart positions after each end-of-text token.")
    reset_attention_mask: bool = option(False, "Keep attention from crossing an end-of-text token.")
    ignore_tokenizer_mismatch: bool = option(
        False,
        "Train on token files made with another tokenizer.",
        resume="free",
    )
    validation_split_percentage: float = option(
        5,
        "Percentage of the training rows, from the first, to replace a missing validation split or "
        "file.",
        at_least=0,
        below=100,
    )
    text_column: str | None = option(
        None,
        "Column or JSON key with the text; by default `text`, else the only column of strings.",
        aliases=("json_key",),
    )
    no_keep_linebreaks: bool = option(False, "Drop line breaks and blank lines of txt files.")
    append_eos: bool = option(
        True, "End every document with the end-of-text token.", aliases=("append_eod",)
    )
    prepend_bos: bool = option(
        False,
        "Begin every document, prompt and text of the exported tokenizer with the "
        "beginning-of-text token.",
    )
    block_size: int | None = option(
        None, "Tokens per sample; by default the model's positions, 1024 at most.", at_least=1
    )
    preprocessing_num_workers: int | None = option(
        None, "Cores that tokenize text; by default all.", at_least=1, resume="free"
    )
    overwrite_cache: bool = option(
        False, "Tokenize again even if the result is cached.", one_shot=True, resume="free"
    )
    data_cache_dir: str | None = option(
        None,
        "Folder for tokenized data; by default $LLM_CACHE_DIR, else ~/.cache/llm.",
        path=True,
        resume="free",
    )


@option_group("Length of training")
class BatchOptions:
    """Options of batches and of the length of a run."""

    per_device_train_batch_size: int | Literal["auto"] = option(
        8,
        "Samples per micro-batch and device; auto finds a size that fits.",
        group=BATCH,
        resume="logged",
        at_least=1,
    )
    per_device_eval_batch_size: int = option(
        8,
        "Samples per evaluation batch and device.",
        group=BATCH,
        resume="logged",
        at_least=1,
        at_most=1_000_000,
    )
    gradient_accumulation_steps: int = option(
        1, "Micro-batches per optimizer step and device.", group=BATCH, at_least=1
    )
    global_batch_size: int | str | None = option(
        None,
        "Samples per optimizer step over all devices, instead of gradient_accumulation_steps; "
        "256@0,512@2B doubles at 2 billion tokens.",
        group=BATCH,
        at_least=1,
    )
    max_duration: Duration = option(
        Duration("3 epochs"),
        "Length of the training, such as 2.5B tokens; about 20 tokens per parameter are "
        "compute-optimal.",
        units={
            "steps": "max_train_steps",
            "samples": "max_train_samples",
            "tokens": "max_train_tokens",
            "epochs": "num_train_epochs",
            "tokens per parameter": "tokens_per_parameter",
        },
        yields="num_train_epochs",  # as in transformers
        above=0,
        resume="fixed",
    )
    skip_samples: str | None = option(
        None,
        "Samples to skip, as FIRST:STOP,... (without STOP), numbered as in the log.",
    )


SOURCES = ("dataset_name", "train_file", "data_path", "data_stage", "train_data_path")
"""Options that name the training data."""


def training_paths(options: DataOptions) -> list[str]:
    """Return the names of the token files for training, each once."""
    stage_words = dict.fromkeys(word for stage in options.data_stage for word in stage.data_path)
    values = (*options.data_path, *options.train_data_path, *stage_words)
    return [word for word in values if isinstance(word, str)]


def find_data_problems(options: DataOptions) -> list[str]:
    """Return faults of the data options, one sentence each."""
    source_flags = [f"--{name}" for name in SOURCES if getattr(options, name)]
    if options.dataset_name and options.validation_file:
        source_flags.append("--validation_file")
    has_training_files = bool(training_paths(options))
    has_token_files = has_training_files or bool(options.valid_data_path)
    has_text = bool(options.dataset_name or options.train_file or options.validation_file)
    has_split = options.split is not None
    has_validation_percentage = "validation_split_percentage" in non_default(options)
    lacks_end_tokens = has_text and not options.append_eos
    checks = [
        (
            len(source_flags) > 1,
            f"{' and '.join(source_flags)} are different sources of data; give one of them.",
        ),
        (
            options.valid_data_path and (options.data_path or has_text),
            "--valid_data_path goes with --train_data_path, or alone with --eval_only; "
            "--data_path is cut by --split, and text has other options.",
        ),
        (
            has_split and not (options.data_path or options.data_stage),
            "--split needs --data_path (or stages); give that too, or leave it out.",
        ),
        (
            options.valid_data_path and options.data_stage and has_split,
            "--valid_data_path leaves the files of data_stage whole, and --split cuts them; give "
            "one of the two.",
        ),
        (
            options.validation_file and has_training_files,
            "--validation_file is text and does not go with token files; name token files to "
            "evaluate on with --valid_data_path.",
        ),
        (
            options.ignore_tokenizer_mismatch and not has_token_files,
            "--ignore_tokenizer_mismatch is for token files, and none are given.",
        ),
        *(
            (
                has_token_files and getattr(options, name),
                f"--{name} is for text, and token files are ready; leave it out.",
            )
            for name in ("text_column", "no_keep_linebreaks", "overwrite_cache")
        ),
        (
            has_token_files and has_validation_percentage,
            "--validation_split_percentage cuts text; token files are cut by --split.",
        ),
        *(
            (
                lacks_end_tokens and getattr(options, name),
                f"--{name} needs documents that end with the end-of-text token; leave "
                "--no_append_eos out.",
            )
            for name in ("reset_position_ids", "reset_attention_mask")
        ),
    ]
    return [
        *find_stage_problems(options.data_stage),
        *_find_notation_problems(options),
        *(sentence for is_violated, sentence in checks if is_violated),
    ]


def _find_notation_problems(options: DataOptions) -> list[str]:
    """Return the faults in the notation of blends and of the split, one sentence each."""
    blends: dict[str, Sequence[float | str]] = {
        f"--{name}": getattr(options, name)
        for name in ("data_path", "train_data_path", "valid_data_path")
    }
    for stage_number, stage in enumerate(options.data_stage, start=1):
        blends[f"data_stage {stage_number}: data_path"] = stage.data_path
    parsers: list[Callable[[], object]] = [
        partial(parse_blend, blend, option=option_label)
        for option_label, blend in blends.items()
        if blend
    ]
    if options.split is not None:
        parsers.append(partial(parse_split, options.split))
    problems = []
    for parse_value in parsers:
        try:
            parse_value()
        except ConfigError as error:
            problems.append(str(error))
    return problems


def find_batch_problems(options: BatchOptions) -> list[str]:
    """Return faults of the batch and length options, one sentence each."""
    problems = []
    try:
        parse_batch_schedule(options.global_batch_size or 1)
    except ConfigError as error:
        problems.append(str(error))
    if options.global_batch_size is not None and options.gradient_accumulation_steps != 1:
        problems.append(
            "--global_batch_size decides gradient accumulation; leave out "
            "--gradient_accumulation_steps."
        )
    try:
        parse_skipped_ranges(options.skip_samples)
    except ConfigError as error:
        problems.append(str(error))
    return problems


def device_batch_size(options: BatchOptions) -> int:
    """Return the samples of a micro-batch; 1 for `auto`, before the search for it."""
    size = options.per_device_train_batch_size
    return size if isinstance(size, int) else 1


def find_stage_problems(stages: Sequence[DataStage]) -> list[str]:
    """Return the faults in the sequence of stages, one sentence each."""
    problems = []
    stage_start = 0
    for stage_number, stage in enumerate(stages, start=1):
        name, is_last = f"data_stage {stage_number}", stage_number == len(stages)
        if not stage.data_path:
            problems.append(f"{name} has no data_path; name its token files.")
        if stage.until is None and not is_last:
            problems.append(
                f"{name} has no until, which only the last stage leaves out; give the tokens at "
                "its end."
            )
        elif stage.until is not None and is_last:
            problems.append(
                f"{name} is the last stage and lasts to the end of the run; leave out its until = "
                f"{stage.until}."
            )
        elif stage.until is not None and stage.until <= stage_start:
            problems.append(
                f"{name} ends at {stage.until:,} tokens and begins at {stage_start:,}; give the "
                "stages in the order of their until."
            )
        stage_start = stage.until or stage_start
    return problems
