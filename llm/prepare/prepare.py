"""`llm-trainers prepare`: text to token files, ahead of training."""

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from llm.config.command_line import parse_options
from llm.config.program import program
from llm.errors import ConfigError
from llm.prepare.options import PrepareConfig, check_prepare_config
from llm.runtime.logging import set_up_logging

if TYPE_CHECKING:
    from llm.prepare.encoder import Encoding
    from llm.prepare.output_files import Output
    from llm.prepare.shares import Share
    from llm.prepare.text.sources import Source
    from llm.prepare.tokenize_shards import Cluster

logger = logging.getLogger("llm.data")


def prepare(config: PrepareConfig, share: "Share") -> None:
    """Write the token files, or a rank's share of them.

    Raises:
        LLMError: An option or the data is wrong.
    """
    # Linear algebra is not used here, and numpy would start a thread for it on each core.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    # Imported here so that --help and wrong options load no library.
    from llm.prepare.output_files import check_replaceable
    from llm.prepare.prepare_files import prepare_files

    if config.overwrite and share.world_size > 1:
        raise ConfigError(
            "--overwrite goes with one process only, since a rank may start when the others have "
            "finished; remove the files that exist."
        )
    outputs = _plan_outputs(config)
    input_files = [file for sources, _ in outputs for source in sources for file in source.files]
    tokenizer_files = (config.tokenizer_name, config.vocab_file, config.merges_file)
    input_files += [Path(name) for name in tokenizer_files if name and os.path.isfile(name)]
    for _, output in outputs:
        check_replaceable(output, input_files)
    encoding = _make_encoding(config)
    with _open_workers(config) as workers:
        prepare_files(
            outputs,
            encoding=encoding,
            workers=workers,
            log_seconds=config.log_seconds,
            share=share,
        )


@contextmanager
def _open_workers(config: PrepareConfig) -> Iterator["int | Cluster"]:
    """Yield the number of processes on this machine, or a cluster that is connected meanwhile."""
    if config.executor == "dask":
        from llm.prepare.dask_cluster import connect_to_dask

        with connect_to_dask(config.scheduler_file) as cluster:
            yield cluster
    else:
        from llm.data.workers import limit_workers

        yield limit_workers(config.workers)


def _make_encoding(config: PrepareConfig) -> "Encoding":
    """Load the tokenizer, and return how texts become ids.

    Raises:
        ConfigError: The tokenizer cannot be loaded, or has too many ids for the format.
    """
    from llm.data.formats.megatron import token_dtype
    from llm.prepare.encoder import Encoding
    from llm.prepare.text_tokenizer import load_text_tokenizer
    from llm.tokenizers.load_tokenizer import choose_begin_token, choose_end_token
    from llm.tokenizers.options import TokenizerOptions

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
    return Encoding(
        tokenizer=tokenizer,
        end_token=choose_end_token(tokenizer.eos_token_id, config.append_eos),
        begin_token=choose_begin_token(tokenizer.bos_token_id, config.prepend_bos),
        dtype=token_dtype(0 if config.format == "nanogpt" else tokenizer.size),
        allow_special_tokens=config.allow_special_tokens,
        on_error=config.on_error,
    )


def _plan_outputs(config: PrepareConfig) -> list[tuple[list["Source"], "Output"]]:
    """Return the sources of each output."""
    from llm.data.formats.megatron import add_suffix
    from llm.prepare.text.sources import find_text_sources

    assert config.output_prefix is not None  # `check_prepare_config` asks for it
    prefix = Path(config.output_prefix)
    if config.dataset_name is not None:
        sources = _find_dataset_sources(config, config.dataset_name)
    else:
        sources = find_text_sources(
            config.input, text_column=config.text_column, text_unit=config.text_unit
        )
    if config.shuffle == "documents" and any(source.one_document for source in sources):
        raise ConfigError(
            "--shuffle documents needs documents smaller than a txt file; choose --text_unit line "
            "or paragraph."
        )
    if config.format == "nanogpt":
        return [(sources, _make_output(config, prefix))]
    suffix = f"_{config.text_column}_document"
    if not config.output_per_input:
        return [(sources, _make_output(config, add_suffix(prefix, suffix)))]
    return _plan_output_per_input(config, prefix, sources, suffix=suffix)


def _plan_output_per_input(
    config: PrepareConfig, prefix: Path, sources: list["Source"], *, suffix: str
) -> list[tuple[list["Source"], "Output"]]:
    """Return an output for each source, named after it.

    Raises:
        ConfigError: Two sources have the same name.
    """
    from llm.data.formats.megatron import add_suffix
    from llm.data.text_identity import bare_name

    outputs = []
    source_name_by_prefix: dict[Path, str] = {}
    for source in sources:
        source_prefix = add_suffix(prefix, f"_{bare_name(Path(source.name))}{suffix}")
        if source_prefix in source_name_by_prefix:
            raise ConfigError(
                f"--output_per_input would write {source_name_by_prefix[source_prefix]} and "
                f"{source.name} to the same {source_prefix}.bin; rename one, or prepare "
                "them one by one."
            )
        source_name_by_prefix[source_prefix] = source.name
        outputs.append(([source], _make_output(config, source_prefix)))
    return outputs


def _make_output(config: PrepareConfig, prefix: Path) -> "Output":
    """Return the output with this prefix, in the format of the options."""
    from llm.prepare.output_files import Output

    is_nanogpt = config.format == "nanogpt"
    return Output(
        prefix=prefix,
        nanogpt=is_nanogpt,
        parts=config.parts,
        validation_percentage=config.validation_split_percentage if is_nanogpt else 0.0,
        shuffle_seed=config.seed if config.shuffle == "documents" else None,
        overwrite=config.overwrite,
    )


def _find_dataset_sources(config: PrepareConfig, dataset_name: str) -> list["Source"]:
    """Return the sources of a split of a data set: its files, or else a stream from the Hub."""
    from llm.data.dataset_folder import open_dataset_folder
    from llm.prepare.text.hub import make_dataset_source
    from llm.prepare.text.sources import make_file_source

    folder = open_dataset_folder(dataset_name, config.dataset_config_name, file_option="--input")
    if config.streaming and os.path.isdir(dataset_name):
        logger.warning(
            f"--streaming has no effect: {dataset_name} is a local folder, which is read without a "
            "copy"
        )
    split = config.dataset_split
    if folder is not None:
        return [
            make_file_source(
                path,
                text_column=config.text_column,
                text_unit=config.text_unit,
                option="--dataset_name",
            )
            for path in folder.list_files(split)
        ]
    source = make_dataset_source(
        dataset_name,
        config.dataset_config_name,
        split,
        text_column=config.text_column,
        trust_remote_code=config.trust_remote_code,
        streaming=config.streaming,
    )
    return [source]


@program
def main(argv: Sequence[str]) -> int:
    """Run the program; return the exit code."""
    set_up_logging(rank=0)
    config = parse_options(
        PrepareConfig,
        argv,
        prog="llm-trainers prepare",
        description="Turn text into token files, on all cores.",
    )
    check_prepare_config(config)
    from llm.prepare.shares import find_share  # here, since --help loads no library

    share = find_share(config.rank, config.world_size, os.environ)
    if config.executor == "dask" and share.world_size > 1:
        raise ConfigError(
            f"--executor dask goes with one process, and this is {share}; start it once, or give "
            "--executor processes."
        )
    set_up_logging(rank=share.rank, level_of_other_ranks=logging.INFO)
    prepare(config, share)
    return 0
