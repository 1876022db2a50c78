"""What every program does with an error: a sentence and an exit code, no traceback."""

import subprocess
import sys

import pytest

from llm.config.program import program
from llm.errors import ConfigError


@pytest.mark.parametrize(
    ("error", "code", "sentence"),
    [
        (ConfigError("--size must be above 0."), 2, "error: --size must be above 0.\n"),
        (
            FileNotFoundError(2, "No such file or directory", "text.txt"),
            2,
            "error: text.txt cannot be used: No such file or directory.\n",
        ),
        (
            OSError(30, "Read-only file system", "out/page.html"),
            2,
            "error: out/page.html cannot be written: Read-only file system; name a path on another "
            "file system.\n",
        ),
        (
            MemoryError("Cannot allocate memory (os error 12)"),
            2,
            "error: Cannot allocate memory (os error 12); free some memory, or raise the limit on "
            "it (ulimit -v).\n",
        ),
        (OSError("gpt2 is no model.\nSee the hub."), 2, "error: gpt2 is no model. See the hub.\n"),
        (KeyboardInterrupt(), 130, "Interrupted.\n"),
    ],
)
def test_an_error_becomes_a_sentence_and_an_exit_code(error, code, sentence, capsys):
    @program
    def main(argv):
        raise error

    assert main([]) == code
    assert capsys.readouterr().err == sentence


def test_an_unforeseen_error_keeps_its_traceback():
    @program
    def main(argv):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        main([])


def test_without_arguments_a_program_reads_those_of_its_process(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["program", "--size", "3"])
    assert program(len)() == 2


def test_a_reader_that_has_seen_enough_ends_a_program_silently():
    script = """
import sys
from llm.config.program import program
sys.exit(program(lambda words: any(print("line") for _ in range(100_000)))())
"""
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"line\n"
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait() == 128 + 13
