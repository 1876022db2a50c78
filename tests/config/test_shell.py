import subprocess
import sys
from pathlib import Path

import pytest

from llm.config.shell import shell_line

SHOW = "import os, sys; print([os.fsencode(word) for word in sys.argv[1:]])"


@pytest.mark.parametrize(
    "word",
    [
        "a b",
        "it's",
        '"$HOME" `date`',
        "~",
        "~/runs",
        "späces",
        "a\nb",
        "\x1b[31mred\\",
        "\udcff",
        "",
    ],
    ids=ascii,
)
def test_a_word_reaches_the_program_as_it_is(word):
    line = shell_line([sys.executable, "-c", SHOW, word, f"--option={word}"])

    assert line.isprintable()
    shown = subprocess.run(["bash", "-c", line], capture_output=True, check=True).stdout
    assert eval(shown) == [
        word.encode(errors="surrogateescape"),
        b"--option=" + word.encode(errors="surrogateescape"),
    ]


def test_a_path_is_not_taken_for_an_option():
    assert shell_line(["cat", "-n", Path("-dash/a b"), Path("/-a")]) == "cat -n './-dash/a b' /-a"
