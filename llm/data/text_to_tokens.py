"""Turns text into token files in a subprocess, `llm.prepare.run_text`.

A run has started threads, which do not survive the forks of the workers. And once the token files
exist, it needs neither the readers of text nor the encoders.
"""

import contextlib
import json
import logging
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING

from llm.data.text_identity import (
    Json,
    Stamps,
    check_text_file,
    compute_sampled_digest,
    file_identity,
    file_options,
    file_stamp,
    identify_dataset,
    make_provenance,
    provenance_digest,
    stamp_dataset_files,
)
from llm.errors import DataError
from llm.runtime.files import temporary_folder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PROGRAM = "llm.prepare.run_text"
_ERROR_PREFIX = "error: "
_SHUTDOWN_SECONDS = 10.0  # after them, a subprocess that should end is killed

logger = logging.getLogger("llm.data")


@dataclass(frozen=True, kw_only=True)
class Text:
    """The text of one split of a run.

    Attributes:
        name: The path of a file or a folder, or the name of a data set.
        option: The option that names it, such as `--train_file`.
        paths: Its files in the order of reading; none if the datasets library reads it.
        split: The split of a data set that the datasets library reads; else None.
        config_name: The configuration of that data set.
        text_column: The field with the text; None takes `text`, else the only field of strings.
        keep_linebreaks: Whether a line of a text file keeps its line break.
        trust_remote_code: Whether to run code that comes with a data set.
    """

    name: str
    option: str
    paths: tuple[str, ...] = ()
    split: str | None = None
    config_name: str | None = None
    text_column: str | None
    keep_linebreaks: bool
    trust_remote_code: bool

    def stamp_files(self) -> Stamps:
        """Return size and modification time of each file of the text.

        Raises:
            DataError: The file or folder does not exist, or is of another kind.
        """
        if self.split is not None:
            return stamp_dataset_files(self.name)
        stamps = {}
        for path in map(Path, self.paths):
            check_text_file(path, self.option)
            stamps[path] = file_stamp(path)
        return stamps

    def identify_files(self, stamps: Stamps) -> list[dict[str, Json]]:
        """Return values that identify the text: names, options, stamps and digests of its files.

        Size and time do not tell whether a file has changed if all times are equal, as in an
        archive or an image. So each identity contains a digest of sampled content, too.

        Args:
            stamps: Size and modification time of its files.
        """
        digest_by_path = {path: compute_sampled_digest(path) for path in stamps}
        if self.split is not None:
            identity = identify_dataset(
                self.name,
                self.config_name,
                split=self.split,
                text_column=self.text_column,
                stamps=stamps,
            )
            return [{**identity, "content": "".join(digest_by_path.values())}]
        return [
            {
                **file_identity(path, stamps[path], self._file_options(path)),
                "content": digest_by_path[path],
            }
            for path in stamps
        ]

    def _file_options(self, path: Path) -> dict[str, Json]:
        return file_options(
            path,
            text_column=self.text_column,
            keep_linebreaks=self.keep_linebreaks,
            text_unit="file",
        )


@dataclass(frozen=True, kw_only=True)
class TokenizerCopy:
    """A tokenizer for another process.

    Attributes:
        name: Its name, for the sidecar.
        backend: The tokenizer as JSON of the `tokenizers` library; None for a Python tokenizer.
        folder: Folder with a saved Python tokenizer; else None.
        bos_token_id: Id of the token that begins a text, or None.
        eos_token_id: Id of the token that ends a text, or None.
        size: Number of tokens; if ids have gaps, the largest id plus one.
        fingerprint: Equal for tokenizers that give equal ids.
    """

    name: str
    backend: str | None
    folder: str | None
    bos_token_id: int | None
    eos_token_id: int | None
    size: int
    fingerprint: str


@dataclass(frozen=True, kw_only=True)
class TextJob:
    """The token files to make from a text.

    Attributes:
        text: The text.
        files: State of its files by path; any other state is refused.
        tokenizer: The tokenizer.
        end_token: Id that ends each document; None adds no token.
        begin_token: Id that begins each document; None adds no token.
        dtype: Dtype of the ids on the disk.
        workers: Cores to use.
        prefix: Path of the token files without suffix.
    """

    text: Text
    files: dict[str, dict[str, int]]
    tokenizer: TokenizerCopy
    end_token: int | None
    dtype: str
    workers: int
    prefix: str
    begin_token: int | None = None

    @classmethod
    def from_json(cls, line: bytes) -> "TextJob":
        """Return the job that `run_text_job` has written."""
        values = json.loads(line)
        text, tokenizer = Text(**values.pop("text")), TokenizerCopy(**values.pop("tokenizer"))
        return cls(text=text, tokenizer=tokenizer, **values)


@dataclass(frozen=True, kw_only=True)
class TextEncoding:
    """How a run's texts become ids; for the attributes see `TextJob`."""

    tokenizer: "PreTrainedTokenizerBase"
    fingerprint: str
    size: int
    end_token: int | None
    dtype: str
    begin_token: int | None = None

    def compute_key(self, text: Text, stamps: Stamps) -> str:
        """Return a digest of a text's token files; equal digests mean equal bytes."""
        return provenance_digest(
            make_provenance(
                text.identify_files(stamps),
                tokenizer_fingerprint=self.fingerprint,
                end_token=self.end_token,
                begin_token=self.begin_token,
                dtype=self.dtype,
            )
        )

    def write_token_files(self, text: Text, stamps: Stamps, folder: Path, *, workers: int) -> None:
        """Write the token files `tokens.*` of a text to a folder.

        If a data set has no validation split, the file `absent` is written instead.

        Args:
            text: The text.
            stamps: The result of `text.stamp_files()`; files that have changed since are refused.
            folder: The folder, which exists.
            workers: Cores to use.
        """
        with self._copy_tokenizer() as tokenizer:
            job = TextJob(
                text=text,
                files={str(path): stamp for path, stamp in stamps.items()},
                tokenizer=tokenizer,
                end_token=self.end_token,
                begin_token=self.begin_token,
                dtype=self.dtype,
                workers=workers,
                prefix=str(folder / "tokens"),
            )
            run_text_job(job)

    @contextlib.contextmanager
    def _copy_tokenizer(self) -> Iterator[TokenizerCopy]:
        """Yield the tokenizer for a subprocess; one in Python is saved in a temporary folder."""
        with contextlib.ExitStack() as stack:
            backend = getattr(self.tokenizer, "backend_tokenizer", None)
            tokenizer_folder = None
            if backend is None:
                tokenizer_folder = str(stack.enter_context(temporary_folder()))
                self.tokenizer.save_pretrained(tokenizer_folder)
            yield TokenizerCopy(
                name=self.tokenizer.name_or_path,
                backend=None if backend is None else backend.to_str(),
                folder=tokenizer_folder,
                bos_token_id=self.tokenizer.bos_token_id,
                eos_token_id=self.tokenizer.eos_token_id,
                size=self.size,
                fingerprint=self.fingerprint,
            )


def run_text_job(job: TextJob) -> None:
    """Make token files in a subprocess, forward its log, and end it with this process.

    Raises:
        DataError: The error of the process.
        RuntimeError: The process failed unexpectedly.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", PROGRAM],
        stdin=subprocess.PIPE,  # it ends when this process ends and closes the pipe
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,  # Ctrl-C goes to this process, which forwards it
    )
    assert process.stdin is not None
    assert process.stdout is not None
    output_lines: list[str] = []
    try:
        with contextlib.suppress(BrokenPipeError):  # it has already failed and reports why
            process.stdin.write(json.dumps(asdict(job)).encode() + b"\n")
            process.stdin.flush()
        _log_lines(process.stdout, output_lines)
        exit_code = process.wait()
    except BaseException:
        _close_pipe(process.stdin)  # as if this process had died: it logs its progress and ends
        with _kill_slow_process(process):
            _log_lines(process.stdout, output_lines)
        raise
    finally:
        process.kill()
        process.wait()
        _close_pipe(process.stdin)
        process.stdout.close()
    _raise_job_error(exit_code, output_lines, text_name=job.text.name)


@contextlib.contextmanager
def _kill_slow_process(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Kill a process if the context takes longer than `_SHUTDOWN_SECONDS`."""
    kill_timer = threading.Timer(_SHUTDOWN_SECONDS, process.kill)
    kill_timer.daemon = True
    kill_timer.start()
    try:
        yield
    finally:  # after a second Ctrl-C too
        kill_timer.cancel()


def _raise_job_error(exit_code: int, output_lines: list[str], *, text_name: str) -> None:
    """Log the output of a subprocess as warnings, and raise the error that it ended with.

    Args:
        exit_code: Its exit code: 2 after a DataError, negative after a signal.
        output_lines: Its output without its log; the error, if any, is last.
        text_name: Name of the text, for messages.

    Raises:
        DataError: The error of the process, or it was killed.
        RuntimeError: The process failed unexpectedly.
    """
    is_error_line = [line.startswith(_ERROR_PREFIX) for line in output_lines]
    num_other_lines = is_error_line.index(True) if any(is_error_line) else len(output_lines)
    for line in output_lines[:num_other_lines]:  # of a library, or a traceback
        logger.warning(line)
    if exit_code == 2:
        error_lines = output_lines[num_other_lines:]
        raise DataError("\n".join(error_lines).removeprefix(_ERROR_PREFIX))
    if exit_code < 0:
        raise DataError(
            f"The process that made token files of {text_name} was killed "
            f"({signal.Signals(-exit_code).name}), perhaps because the memory ran out; start again "
            "with fewer --preprocessing_num_workers."
        )
    if exit_code != 0:
        raise RuntimeError(f"{PROGRAM} has failed with the exit code {exit_code}")


def _close_pipe(pipe: IO[bytes]) -> None:
    with contextlib.suppress(BrokenPipeError):  # closing would flush unread data again
        pipe.close()


def _log_lines(lines: IO[bytes], output_lines: list[str]) -> None:
    """Forward the process's log, and collect its other output."""
    for line in lines:
        try:
            level, message = json.loads(line)
            logger.log(level, message)
        except (ValueError, TypeError):
            output_lines.append(line.decode(errors="replace").rstrip())
