"""`python -m llm.data.prepare`: text to token files, ahead of training."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from llm.config.command_line import parse
from llm.config.options import lacking, option, option_group
from llm.config.program import program
from llm.errors import ConfigError
from llm.runtime.logging import set_up_logging

if TYPE_CHECKING:
    from llm.data.preparation.output_files import Output
    from llm.data.text.sources import Source

TOKENIZER = "Tokenizer"
OUTPUT = "Output"
RUNNING = "Running"


@option_group("Input")
class PrepareConfig:
    """Options of `python -m llm.data.prepare`."""

    input: tuple[str, ...] = option(
        (),
        "Files, quoted patterns and folders with jsonl, json, csv, parquet or txt files; all but "
        "parquet may be compressed as gz, xz, zst or bz2.",
        path=True,
    )
    text_column: str | None = option(
        None,
        "JSON key or column that holds the text; by default `text`.",
        aliases=("json_key", "json_keys"),
    )
    text_unit: Literal["line", "paragraph", "file"] = option(
        "file", "Unit of a txt file that is one document; blank lines separate paragraphs."
    )
    dataset_name: str | None = option(
        None, "Data set on the Hub or a local folder, instead of input.", path=True
    )
    dataset_config_name: str | None = option(
        None, "Configuration (subset) of the data set.", requires=("dataset_name",)
    )
    dataset_split: str = option("train", "Split of the data set.")
    streaming: bool = option(
        False,
        "Read the data set over the network without keeping a copy.",
        requires=("dataset_name",),
    )
    trust_remote_code: bool = option(
        False, "Run tokenizer or data set code that comes with a Hub repository."
    )
    on_error: Literal["stop", "skip"] = option(
        "stop", "Stop at an unusable record, or skip and count it."
    )

    tokenizer_name: str | None = option(
        None,
        "Hub name, folder, tokenizer.json or SentencePiece .model of the tokenizer.",
        group=TOKENIZER,
        path=True,
    )
    vocab_file: str | None = option(
        None,
        "GPT-2 style vocab.json; goes with merges_file.",
        group=TOKENIZER,
        path=True,
        requires=("merges_file",),
    )
    merges_file: str | None = option(
        None,
        "GPT-2 style merges.txt; goes with vocab_file.",
        group=TOKENIZER,
        path=True,
        aliases=("merge_file",),
        requires=("vocab_file",),
    )
    use_slow_tokenizer: bool = option(
        False, "Use the tokenizer's Python implementation, if it has one.", group=TOKENIZER
    )
    append_eos: bool = option(
        True,
        "End every document with the tokenizer's end-of-text token.",
        group=TOKENIZER,
        aliases=("append_eod",),
    )
    allow_special_tokens: bool = option(
        False,
        "Encode the name of a special token in a text, such as <|endoftext|>, as this token; by "
        "default it is encoded as text.",
        group=TOKENIZER,
    )

    output_prefix: str | None = option(
        None,
        "Path of the output: PREFIX_text_document.bin and .idx (the middle is the JSON key), or "
        "the folder PREFIX in nanoGPT's format.",
        group=OUTPUT,
        path=True,
    )
    format: Literal["megatron", "nanogpt"] = option(
        "megatron",
        "A .bin/.idx pair for Megatron-LM, NeMo and this trainer, or train.bin and val.bin as in "
        "nanoGPT.",
        group=OUTPUT,
    )
    output_per_input: bool = option(
        False, "Write one pair of files per input file, with its name after PREFIX.", group=OUTPUT
    )
    shuffle: Literal["none", "documents"] = option(
        "none", "Shuffle the documents by the seed.", group=OUTPUT
    )
    seed: int = option(0, "Seed of the shuffling.", group=OUTPUT, at_least=0)
    validation_split_percentage: float = option(
        0.05,
        "Percentage of the documents, from the first one, that go to nanoGPT's val.bin; 0 writes "
        "none.",
        group=OUTPUT,
        at_least=0,
        below=100,
    )
    overwrite: bool = option(False, "Replace files that exist.", group=OUTPUT)

    workers: int | None = option(
        None, "Cores to use; by default, and at most, all cores.", group=RUNNING, at_least=1
    )
    log_seconds: float = option(
        10.0, "Seconds between two lines on the progress.", group=RUNNING, above=0
    )


def check(config: PrepareConfig) -> None:
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
    problems += lacking(config)
    if problems:
        raise ConfigError(" ".join(problems))


def prepare(config: PrepareConfig) -> None:
    """Write the token files.

    Raises:
        LLMError: An option or the data is wrong.
    """
    # Linear algebra is not used here, and numpy would start a thread for it on each core.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    # Imported here so that --help and wrong options load no library.
    from llm.data.formats.megatron import token_dtype
    from llm.data.preparation.encoder import Encoding
    from llm.data.preparation.output_files import check_replaceable
    from llm.data.preparation.prepare_files import prepare_files
    from llm.data.workers import bounded_workers
    from llm.tokenizers.fast import load_text_tokenizer
    from llm.tokenizers.load_tokenizer import end_token
    from llm.tokenizers.options import TokenizerOptions

    outputs = _outputs(config)
    inputs = [file for sources, _ in outputs for source in sources for file in source.files]
    named = (config.tokenizer_name, config.vocab_file, config.merges_file)
    inputs += [Path(name) for name in named if name is not None and os.path.isfile(name)]
    for _, output in outputs:
        check_replaceable(output, inputs)
    tokenizer = load_text_tokenizer(
        TokenizerOptions(
            tokenizer_name=config.tokenizer_name,
            vocab_file=config.vocab_file,
            merges_file=config.merges_file,
            use_slow_tokenizer=config.use_slow_tokenizer,
        ),
        trust_remote_code=config.trust_remote_code,
    )
    if config.format == "nanogpt" and tokenizer.size > 1 << 16:
        raise ConfigError(
            f"--format nanogpt holds ids below 65,536, and the tokenizer has {tokenizer.size:,}; "
            "use --format megatron."
        )
    encoding = Encoding(
        tokenizer=tokenizer,
        end_token=end_token(tokenizer.eos_token_id, config.append_eos),
        dtype=token_dtype(0 if config.format == "nanogpt" else tokenizer.size),
        allow_special_tokens=config.allow_special_tokens,
        on_error=config.on_error,
    )
    prepare_files(
        outputs,
        encoding=encoding,
        workers=bounded_workers(config.workers),
        log_seconds=config.log_seconds,
    )


def _outputs(config: PrepareConfig) -> list[tuple[list["Source"], "Output"]]:
    """Return the sources of each output."""
    from llm.data.formats.megatron import beside
    from llm.data.preparation.output_files import Output
    from llm.data.text.sources import text_sources

    def output(prefix: Path) -> Output:
        nanogpt = config.format == "nanogpt"
        return Output(
            prefix=prefix,
            nanogpt=nanogpt,
            validation_percentage=config.validation_split_percentage if nanogpt else 0.0,
            shuffle_seed=config.seed if config.shuffle == "documents" else None,
            overwrite=config.overwrite,
        )

    assert config.output_prefix is not None  # `check` asks for it
    prefix = Path(config.output_prefix)
    key = "text" if config.text_column is None else config.text_column
    if config.dataset_name is not None:
        from llm.data.text.hub import dataset_sources

        files = [
            dataset_sources(
                config.dataset_name,
                config.dataset_config_name,
                text_column=key,
                trust_remote_code=config.trust_remote_code,
                splits=[config.dataset_split],
                streaming=config.streaming,
                file_option="--input",
            )[config.dataset_split]
        ]
    else:
        files = text_sources(config.input, text_column=key, text_unit=config.text_unit)
    if config.shuffle == "documents" and any(file.one_document for file in files):
        raise ConfigError(
            "--shuffle documents needs documents smaller than a txt file; choose --text_unit line "
            "or paragraph."
        )
    if config.format == "nanogpt":
        return [(files, output(prefix))]
    if not config.output_per_input:
        return [(files, output(beside(prefix, f"_{key}_document")))]
    outputs: list[tuple[list[Source], Output]] = []
    seen: dict[Path, str] = {}
    for file in files:
        stem = Path(file.name).name.partition(".")[0]
        made = output(beside(prefix, f"_{stem}_{key}_document"))
        if made.prefix in seen:
            raise ConfigError(
                f"--output_per_input would write {seen[made.prefix]} and {file.name} to the same "
                f"{made.prefix}.bin; rename one, or prepare them one by one."
            )
        seen[made.prefix] = file.name
        outputs.append(([file], made))
    return outputs


@program
def main(argv: Sequence[str]) -> int:
    """Run the program; return the exit code."""
    set_up_logging(rank=0)
    config = parse(
        PrepareConfig,
        argv,
        prog="python -m llm.data.prepare",
        description="Turn text into token files, on all cores.",
    )
    check(config)
    prepare(config)
    return 0


if __name__ == "__main__":
    sys.exit(main())
