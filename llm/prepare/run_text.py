"""Turns text into token files for a run, which starts this program and forwards its log.

It reads a `TextJob` from standard input and writes each log line as a line of JSON with level and
message. Errors and exit codes are the same as for `llm-trainers prepare`.
"""

import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from llm.config.program import program
from llm.data.text_to_tokens import TextJob, TokenizerCopy
from llm.errors import ConfigError
from llm.prepare.text.sources import Source, check_sources_unchanged, make_file_source
from llm.prepare.text_tokenizer import TextTokenizer, wrap_transformers_tokenizer
from llm.runtime.logging import quiet_libraries
from llm.tokenizers.load_tokenizer import load_tokenizer
from llm.tokenizers.options import TokenizerOptions

_SHUTDOWN_SECONDS = 5.0  # to log which shards are kept, and to end

logger = logging.getLogger("llm.data")


class _JsonHandler(logging.Handler):
    """Writes each line of the log for `text_to_tokens`, which reads them."""

    def emit(self, record: logging.LogRecord) -> None:
        sys.stdout.write(json.dumps([record.levelno, record.getMessage()]) + "\n")
        sys.stdout.flush()


@program
def main(argv: Sequence[str]) -> int:
    """Run the program; return the exit code."""
    logger = logging.getLogger("llm")
    logger.handlers = [_JsonHandler()]
    logger.setLevel(logging.INFO)
    # numpy would start a thread on each core for linear algebra, which is not needed here.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job ignores it
    job = TextJob.from_json(_read_line())
    threading.Thread(target=_end_with_run, daemon=True).start()
    make_token_files(job)
    return 0


def _read_line() -> bytes:
    """Read a line of input without a buffer: a fork could copy its lock while a thread holds it."""
    pieces = [b""]
    while not pieces[-1].endswith(b"\n"):
        pieces.append(os.read(0, 1 << 20))
        if not pieces[-1]:
            raise EOFError("the run has ended")
    return b"".join(pieces)


def _end_with_run() -> None:
    """Wait until the run closes the pipe, which also happens when it dies; then end."""
    os.read(0, 1)
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(_SHUTDOWN_SECONDS)
    os._exit(1)  # the workers end with this process


def make_token_files(job: TextJob) -> None:
    """Make the token files of a job, resuming the work of an earlier run.

    Raises:
        LLMError: The text is missing, broken or empty, or the token files cannot be written.
    """
    import numpy as np

    from llm.prepare.encoder import Encoding
    from llm.prepare.output_files import Output
    from llm.prepare.prepare_files import prepare_files

    prefix = Path(job.prefix)
    sources = _open_sources(job)
    _use_recorded_stamps(sources, job)
    is_split_missing = job.text.split == "validation" and not sources[0].exists()
    check_sources_unchanged(sources)
    if is_split_missing:
        (prefix.parent / "absent").touch()
        return
    _log_size(sources, job.text.name)
    output = Output(
        prefix=prefix,
        overwrite=True,
        row_bytes=True,
        lock_seconds=2 * _SHUTDOWN_SECONDS,  # by then, the process of a killed run has ended
        option="--data_cache_dir",
    )
    encoding = Encoding(
        tokenizer=_load_tokenizer_copy(job.tokenizer, job.text.trust_remote_code),
        end_token=job.end_token,
        begin_token=job.begin_token,
        dtype=np.dtype(job.dtype),
    )
    prepare_files([(sources, output)], encoding=encoding, workers=job.workers)


def _use_recorded_stamps(sources: list[Source], job: TextJob) -> None:
    """Give the sources the stamps of their files from when the run computed its cache key.

    A text that has changed since then must not be used.
    """
    for source in sources:
        paths = source.files if job.text.paths else map(Path, job.files)
        source.files = {path: job.files[str(path)] for path in paths}


def _log_size(sources: list[Source], text_name: str) -> None:
    """Log that a text is tokenized, with its size if it is known."""
    byte_counts = [source.num_bytes for source in sources if source.num_bytes is not None]
    size_note = f" ({sum(byte_counts) / 1e6:,.1f} MB)" if byte_counts else ""
    logger.info(f"tokenizing {text_name}{size_note}")


def _open_sources(job: TextJob) -> list[Source]:
    """Return the sources of a job's text: a split of a data set, or files."""
    text = job.text
    if text.split is not None:
        from llm.prepare.text.hub import make_dataset_source

        source = make_dataset_source(
            text.name,
            text.config_name,
            text.split,
            text_column=text.text_column,
            trust_remote_code=text.trust_remote_code,
        )
        return [source]
    return [
        make_file_source(
            Path(path),
            text_column=text.text_column,
            keep_linebreaks=text.keep_linebreaks,
            option=text.option,
        )
        for path in text.paths
    ]


def _load_tokenizer_copy(copy: TokenizerCopy, trust_remote_code: bool) -> TextTokenizer:
    """Load the copy of the run's tokenizer: its backend as JSON, or its folder.

    Raises:
        ConfigError: The saved tokenizer cannot be loaded, or gives other ids.
    """
    if copy.backend is None:
        return _load_saved_tokenizer(copy, trust_remote_code)
    from tokenizers import Tokenizer

    return TextTokenizer(
        name=copy.name,
        backend=Tokenizer.from_str(copy.backend),
        encode_slow=None,
        eos_token_id=copy.eos_token_id,
        bos_token_id=copy.bos_token_id,
        size=copy.size,
        fingerprint=copy.fingerprint,
    )


def _load_saved_tokenizer(copy: TokenizerCopy, trust_remote_code: bool) -> TextTokenizer:
    """Load a tokenizer in Python from the folder of its copy, and compare the fingerprint."""
    quiet_libraries()
    options = TokenizerOptions(tokenizer_name=copy.folder, use_slow_tokenizer=True)
    remedy = "the text cannot be prepared in a run; prepare it ahead with llm-trainers prepare."
    try:
        tokenizer = wrap_transformers_tokenizer(
            load_tokenizer(options, trust_remote_code=trust_remote_code), copy.name
        )
    except ConfigError as error:  # it names the temporary folder
        raise ConfigError(
            f"The tokenizer {copy.name} cannot be loaded once it is saved, so {remedy}"
        ) from error
    if tokenizer.fingerprint != copy.fingerprint:
        raise ConfigError(
            f"The tokenizer {copy.name} gives other ids once it is saved and loaded, so {remedy}"
        )
    return tokenizer


if __name__ == "__main__":
    sys.exit(main())
