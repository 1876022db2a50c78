"""A run makes token files of its text in another process, and is told what that says."""

import fcntl
import json
import logging
import subprocess
import sys
import threading
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from transformers import ByT5Tokenizer

from llm.data import text_to_tokens
from llm.data.formats.megatron import TokenFile
from llm.data.formats.sidecar import read_sidecar
from llm.data.text_identity import file_stamp
from llm.data.text_to_tokens import Text, TextEncoding, TextJob, TokenizerCopy, run_text_job
from llm.errors import ConfigError, DataError
from llm.prepare import run_text
from llm.tokenizers.load_tokenizer import choose_end_token, compute_fingerprint, count_ids
from tests.support.processes import is_alive, wait_until
from tests.support.texts import write
from tests.support.tokenizers import tiny_tokenizer


def encoding(tokenizer=None):
    tokenizer = tokenizer or tiny_tokenizer()
    return TextEncoding(
        tokenizer=tokenizer,
        fingerprint=compute_fingerprint(tokenizer),
        size=count_ids(getattr(tokenizer, "backend_tokenizer", None), len(tokenizer)),
        end_token=choose_end_token(tokenizer.eos_token_id, append_eos=True),
        dtype="uint16",
    )


def text(path, **changes):
    settings = {"text_column": None, "keep_linebreaks": True, "trust_remote_code": False}
    return Text(
        name=str(path), option="--train_file", paths=(str(path),), **{**settings, **changes}
    )


def prepared(folder, source, tokenizer=None):
    """The token files that the process makes of a text."""
    folder.mkdir()
    encoding(tokenizer).write_token_files(source, source.stamp_files(), folder, workers=2)
    return TokenFile(folder / "tokens")


def test_the_log_of_the_process_becomes_part_of_the_log_of_the_run(tmp_path, caplog):
    caplog.set_level(logging.INFO, "llm.data")
    file = write(tmp_path / "a.jsonl", '{"text": "the fox"}\n{"text": ""}\n')

    tokens = prepared(tmp_path / "made", text(file)).tokens

    assert tiny_tokenizer().decode(tokens.tolist()) == "the fox<|endoftext|>"
    assert caplog.messages[0] == f"tokenizing {file} (0.0 MB)"
    assert caplog.messages[-1] == f"wrote {tmp_path / 'made' / 'tokens'}.bin"


def test_the_sentence_of_the_process_is_the_error_of_the_run(tmp_path):
    file = write(tmp_path / "a.jsonl", '{"text": "the fox"}\n{"text": \n')

    with pytest.raises(DataError, match=r"^\S+a\.jsonl, line 2\b"):
        prepared(tmp_path / "made", text(file))


def test_a_text_that_changes_after_its_key_was_made_is_refused(tmp_path):
    source = text(write(tmp_path / "a.txt", "old\n"))
    stamps = source.stamp_files()
    write(tmp_path / "a.txt", "newer\n")

    with pytest.raises(DataError, match=r"a\.txt has changed while the text was prepared"):
        encoding().write_token_files(source, stamps, tmp_path, workers=1)

    assert not list(tmp_path.glob("tokens*"))


def test_a_tokenizer_in_python_gives_the_same_ids_in_the_process(tmp_path):
    file = write(tmp_path / "a.txt", "the fox\n")

    made = prepared(tmp_path / "made", text(file), ByT5Tokenizer())

    assert made.tokens.tolist() == ByT5Tokenizer().encode("the fox\n")
    assert read_sidecar(made.prefix).tokenizer_fingerprint == compute_fingerprint(ByT5Tokenizer())


def job_of(file):
    tokenizer = tiny_tokenizer()
    copy = TokenizerCopy(
        name="tiny",
        backend=tokenizer.backend_tokenizer.to_str(),
        folder=None,
        bos_token_id=None,
        eos_token_id=0,
        size=len(tokenizer),
        fingerprint=compute_fingerprint(tokenizer),
    )
    return TextJob(
        text=text(file),
        files={str(file): file_stamp(file)},
        tokenizer=copy,
        end_token=0,
        dtype="uint16",
        workers=2,
        prefix=str(file.parent / "tokens"),
    )


def run_instead(monkeypatch, folder, code):
    """Starts a program of this code in place of the real one."""
    write(folder / "stand_in.py", code)
    monkeypatch.setenv("PYTHONPATH", str(folder))
    monkeypatch.setattr(text_to_tokens, "PROGRAM", "stand_in")


def test_a_killed_process_leads_to_a_sentence_with_a_remedy(tmp_path, monkeypatch):
    run_instead(monkeypatch, tmp_path, "import os; os.kill(os.getpid(), 9)")

    with pytest.raises(DataError, match=r"killed \(SIGKILL\).*--preprocessing_num_workers"):
        run_text_job(job_of(write(tmp_path / "a.txt", "a\n")))


def test_a_defect_of_the_process_fails_with_its_traceback_in_the_log(tmp_path, monkeypatch, caplog):
    run_instead(monkeypatch, tmp_path, "raise ValueError('a defect')")

    with pytest.raises(RuntimeError, match="exit code 1"):
        run_text_job(job_of(write(tmp_path / "a.txt", "a\n")))

    assert "ValueError: a defect" in caplog.messages


def test_warnings_of_libraries_are_no_part_of_the_sentence(tmp_path, monkeypatch, caplog):
    code = "import sys; print('a warning'); print('error: one\\nand two'); sys.exit(2)"
    run_instead(monkeypatch, tmp_path, code)

    with pytest.raises(DataError) as raised:
        run_text_job(job_of(write(tmp_path / "a.txt", "a\n")))

    assert str(raised.value) == "one\nand two"
    assert caplog.messages == ["a warning"]


def test_a_process_that_reads_nothing_of_a_long_job_is_still_quoted(tmp_path, monkeypatch):
    run_instead(monkeypatch, tmp_path, "import sys; print('error: no memory'); sys.exit(2)")
    job = job_of(write(tmp_path / "a.txt", "a\n"))
    longer = replace(job.tokenizer, backend="x" * 1_000_000)  # than what a pipe holds

    with pytest.raises(DataError, match=r"^no memory$"):
        run_text_job(replace(job, tokenizer=longer))


def test_a_second_interruption_leaves_no_timer(tmp_path, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(text_to_tokens, "_log_lines", interrupt)

    with pytest.raises(KeyboardInterrupt):
        run_text_job(job_of(write(tmp_path / "a.txt", "a\n")))

    timers = [thread for thread in threading.enumerate() if isinstance(thread, threading.Timer)]
    assert all(timer.finished.is_set() for timer in timers)


def test_the_process_waits_for_the_process_of_a_killed_run(tmp_path, monkeypatch, caplog):
    caplog.set_level(logging.INFO, "llm.data")
    with open(tmp_path / "tokens.parts.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)

        def release_soon(record):
            if record.getMessage().startswith("tokenizing"):  # the lock is next
                threading.Timer(1.0, lock.close).start()
            return True

        monkeypatch.setattr(text_to_tokens.logger, "filters", [release_soon])
        run_text_job(job_of(write(tmp_path / "a.txt", "a\n")))

    assert (tmp_path / "tokens.bin").exists()


def test_an_error_about_a_saved_tokenizer_names_the_tokenizer(tmp_path):
    (tmp_path / "saved").mkdir()
    job = job_of(write(tmp_path / "a.txt", "a\n"))
    in_python = replace(job.tokenizer, backend=None, folder=str(tmp_path / "saved"))

    with pytest.raises(
        ConfigError, match=r"^The tokenizer tiny cannot be loaded .*llm-trainers prepare"
    ):
        run_text.make_token_files(replace(job, tokenizer=in_python))


# The work on each part takes long, and leaves a line in a file.
SLOW = """
import os, sys, time
from llm.prepare import prepare_files, run_text, tokenize_shards
prepare_files.SHARD_BYTES = 20
write_shard = tokenize_shards.write_shard
def slow(source, stem, *how, **options):
    with open("begun", "a") as file:
        print(os.getpid(), file=file)
    time.sleep(60 if stem.name > "000000" else 0)
    write_shard(source, stem, *how, **options)
tokenize_shards.write_shard = slow
sys.exit(run_text.main([]))
"""


def test_the_process_and_its_workers_end_with_the_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    job = job_of(write(tmp_path / "a.jsonl", '{"text": "the fox"}\n' * 8))
    process = subprocess.Popen(
        [sys.executable, "-c", SLOW], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    process.stdin.write(json.dumps(asdict(job)) + "\n")
    process.stdin.flush()
    wait_until(lambda: Path("begun").exists() and Path("begun").read_text().count("\n") >= 3)
    workers = set(map(int, Path("begun").read_text().split()))

    process.stdin.close()  # as the system does when the run has been killed

    assert process.wait(30) == 130
    assert json.loads(process.stdout.read().splitlines()[-1])[1].startswith("1 of ")
    wait_until(lambda: not any(map(is_alive, workers)))
    assert not list(tmp_path.glob("tokens.bin"))
