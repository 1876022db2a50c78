"""Options of `llm-trainers prepare`."""

from typing import Literal

from llm.config.options import missing_requirements, option, option_group
from llm.errors import ConfigError

TOKENIZER = "Tokenizer"
OUTPUT = "Output"
RUNNING = "Running"


@option_group("Input")
class PrepareConfig:
    """Options of `llm-trainers prepare`."""

    input: tuple[str, ...] = option(
        (),
        "Files, quoted patterns and folders of jsonl, json, csv, parquet or txt files.",
        path=True,
    )
    text_column: str = option(
        "text", "Column or JSON key with the text.", aliases=("json_key", "json_keys")
    )
    text_unit: Literal["line", "paragraph", "file"] = option(
        "file", "One document of a txt file: a line, paragraph, or file."
    )
    dataset_name: str | None = option(
        None,
        "Data set on the Hub, or a folder of text files or from save_to_disk.",
        path=True,
    )
    dataset_config_name: str | None = option(
        None, "Configuration (subset) of dataset_name.", requires=("dataset_name",)
    )
    dataset_split: str = option("train", "Split of the data set.")
    streaming: bool = option(
        False,
        "Read the data set over the network, without a copy.",
        requires=("dataset_name",),
    )
    trust_remote_code: bool = option(
        False, "Run Python code that comes with a model, tokenizer or data set."
    )
    on_error: Literal["stop", "skip"] = option(
        "stop", "Stop at an unusable record, or skip and count it."
    )

    tokenizer_name: str | None = option(
        None,
        "Hub name, folder, tokenizer.json or SentencePiece .model.",
        group=TOKENIZER,
        path=True,
    )
    vocab_file: str | None = option(
        None,
        "GPT-2 style vocab.json, with merges_file.",
        group=TOKENIZER,
        path=True,
        requires=("merges_file",),
    )
    merges_file: str | None = option(
        None,
        "GPT-2 style merges.txt, with vocab_file.",
        group=TOKENIZER,
        path=True,
        aliases=("merge_file",),
        requires=("vocab_file",),
    )
    use_slow_tokenizer: bool = option(
        False, "Use the tokenizer's Python implementation.", group=TOKENIZER
    )
    append_eos: bool = option(
        True,
        "End every document with the end-of-text token.",
        group=TOKENIZER,
        aliases=("append_eod",),
    )
    prepend_bos: bool = option(
        False,
        "Begin every document with the beginning-of-text token; train with it, too.",
        group=TOKENIZER,
    )
    allow_special_tokens: bool = option(
        False,
        "Encode names of special tokens in a text as these tokens.",
        group=TOKENIZER,
    )

    output_prefix: str | None = option(
        None,
        "PREFIX of PREFIX_text_document.bin and .idx, or folder for nanoGPT.",
        group=OUTPUT,
        path=True,
    )
    format: Literal["megatron", "nanogpt"] = option(
        "megatron",
        "megatron, a .bin/.idx pair, or nanogpt, train.bin and val.bin.",
        group=OUTPUT,
    )
    output_per_input: bool = option(
        False, "Write one pair per input file, with its name after PREFIX.", group=OUTPUT
    )
    parts: bool = option(
        False,
        "Leave numbered parts, which training opens as one.",
        group=OUTPUT,
    )
    shuffle: Literal["none", "documents"] = option(
        "none", "What to shuffle: none or documents.", group=OUTPUT
    )
    seed: int = option(0, "Seed of the shuffling.", group=OUTPUT, at_least=0)
    validation_split_percentage: float = option(
        0.05,
        "Percentage of the documents, from the first, for nanoGPT's val.bin.",
        group=OUTPUT,
        at_least=0,
        below=100,
    )
    overwrite: bool = option(False, "Replace files that exist.", group=OUTPUT)

    workers: int | None = option(
        None, "Cores to use; by default, and at most, all.", group=RUNNING, at_least=1
    )
    executor: Literal["processes", "dask"] = option(
        "processes",
        "processes of this node, or dask: workers of the cluster that DASK_SCHEDULER_ADDRESS or "
        "scheduler_file names.",
        group=RUNNING,
    )
    scheduler_file: str | None = option(
        None,
        "File of `dask scheduler --scheduler-file`.",
        group=RUNNING,
        path=True,
        requires=("executor=dask",),
    )
    rank: int | None = option(
        None,
        "Number of this process, from 0; by default from srun, mpiexec, torchrun or a job array.",
        group=RUNNING,
        at_least=0,
        requires=("world_size",),
    )
    world_size: int | None = option(
        None,
        "Number of processes with this command; by default likewise, except in a PBS job array.",
        group=RUNNING,
        at_least=1,
    )
    log_seconds: float = option(
        10.0, "Seconds between lines on the progress.", group=RUNNING, above=0
    )


def check_prepare_config(config: PrepareConfig) -> None:
    """Refuse combinations of options that cannot work.

    Raises:
        ConfigError: One message with a sentence for each fault.
    """
    problems = []
    if bool(config.input) == (config.dataset_name is not None):
        problems.append("Name the text with either --input or --dataset_name.")
    if config.text_column == "":
        problems.append("--text_column is empty; name the JSON key or column with the text.")
    if not config.output_prefix:
        problems.append("Say where to write to with --output_prefix.")
    if (config.tokenizer_name is None) == (config.vocab_file is None):
        problems.append(
            "Name the tokenizer with either --tokenizer_name or --vocab_file and --merges_file."
        )
    if config.output_per_input and (config.format == "nanogpt" or config.dataset_name):
        problems.append("--output_per_input goes with --input and --format megatron only.")
    if config.parts and (config.format == "nanogpt" or config.shuffle != "none"):
        problems.append("--parts goes with --format megatron and --shuffle none only.")
    if config.executor == "dask" and (config.workers or config.rank is not None):
        problems.append(
            "--executor dask goes without --workers and --rank: the cluster has its own workers."
        )
    problems += missing_requirements(config)
    if problems:
        raise ConfigError(" ".join(problems))
