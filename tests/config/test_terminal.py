"""What standard output and standard error get, whatever their encoding and whoever reads them."""

import io
import os
import subprocess
import sys

import pytest

from llm.config.terminal import escape_controls, flush_output, text_for
from llm.trainers.gpt.main import main


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_control_characters_are_escaped_and_other_text_is_unchanged():
    text = "\x1b]0;title\x07 a\tb\nc \r\x7f \x9b2J caf\u00e9 \u72d0"
    escaped = r"\x1b]0;title\x07 a" "\tb\nc " r"\x0d\x7f \x9b2J caf" "\u00e9 \u72d0"
    assert escape_controls(text) == escaped
    assert text_for(Terminal(), text) == escaped
    assert text_for(io.StringIO(), text) == text


def output_of(script: str, encoding: str) -> str:
    environment = {**os.environ, "PYTHONIOENCODING": encoding}
    words = [sys.executable, "-c", script]
    process = subprocess.run(
        words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=60
    )
    return f"{process.returncode} {process.stdout.decode()}"


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_text_that_the_encoding_lacks_is_escaped(encoding):
    script = """
import sys
from llm.config.program import program
from llm.errors import ConfigError
@program
def main(argv):
    print("half a pair \\ud800")
    raise ConfigError("caf\\ud800 is a folder.")
main()
"""
    assert output_of(script, encoding) == "0 half a pair \\ud800\nerror: caf\\ud800 is a folder.\n"


def test_a_full_disk_behind_standard_output_is_an_error_in_one_sentence():
    environment = {**os.environ, "PYTHONUNBUFFERED": ""}
    words = [sys.executable, "-m", "llm", "--version"]
    with open("/dev/full", "w") as full:
        process = subprocess.run(words, env=environment, stdout=full, stderr=subprocess.PIPE)
    assert process.stderr.decode() == (
        "error: standard output cannot be written: No space left on device; free some space.\n"
    )
    assert process.returncode == 2


def test_output_that_a_full_disk_refuses_is_discarded(monkeypatch):
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        full.write("text")
        assert not flush_output()
        assert flush_output()


def test_a_full_disk_behind_standard_output_keeps_the_exit_code_of_a_run(monkeypatch):
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert main(["--no_such_option"]) == 2
        full.flush()  # as Python does at its end, where an error makes the exit code 120


def test_a_closed_standard_output_is_the_null_device():
    command = f"{sys.executable} -m llm --version >&-"
    process = subprocess.run(["sh", "-c", command], stderr=subprocess.PIPE, timeout=60)
    assert (process.returncode, process.stderr) == (0, b"")
