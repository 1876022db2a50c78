"""Options that cannot work, text that cannot be used, and what is loaded to say so."""

import gzip
import subprocess
import sys

import pytest

from llm.prepare.prepare import main
from tests.support.texts import json_lines, write

TEXTS = ["the quick brown fox", "", "the dog sleeps, " * 20]


GOOD = ["--input", "a.jsonl", "--tokenizer_name", "tokenizer", "--output_prefix", "out"]
pytestmark = pytest.mark.usefixtures("at_home")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "Name the text with either --input or --dataset_name. Say where to write to with"),
        ([*GOOD, "--dataset_name", "x"], "Name the text with either --input or --dataset_name."),
        (GOOD[:4], "Say where to write to with --output_prefix."),
        ([*GOOD[:2], *GOOD[4:], "--vocab_file", "v"], "error: --vocab_file needs --merges_file;"),
        ([*GOOD, "--vocab_file", "v"], "Name the tokenizer with either --tokenizer_name or"),
        ([*GOOD, "--merges_file", "m"], "error: --merges_file needs --vocab_file; give that too"),
        ([*GOOD[:2], *GOOD[4:]], "Name the tokenizer with either --tokenizer_name or --vocab_file"),
        ([*GOOD, "--vocab_file", "v", "--merges_file", "m"], "Name the tokenizer with either"),
        ([*GOOD, "--streaming"], "error: --streaming needs --dataset_name; give that too"),
        ([*GOOD, "--dataset_config_name", "x"], "--dataset_config_name needs --dataset_name; give"),
        ([*GOOD, "--output_per_input", "--format", "nanogpt"], "--output_per_input goes with"),
        ([*GOOD, "--shuffle", "windows"], "shuffle"),
        ([*GOOD, "--log_seconds", "0"], "--log_seconds must be greater than 0"),
        ([*GOOD, "--validation_split_percentage", "100"], "must be smaller than 100, not 100"),
        ([*GOOD, "--tokenizer_name", "./none"], "./none"),
        (
            [*GOOD, "--input", "a.txt", "--shuffle", "documents"],
            "--shuffle documents needs documents smaller than a txt file; choose --text_unit line",
        ),
        ([*GOOD, "--json_key", ""], "--text_column is empty; name the JSON key or column with the"),
        ([*GOOD, "--output_prefix", ""], "--output_prefix is given an empty path; name one"),
        ([*GOOD[2:], "--dataset_name", "a.txt"], "a.txt is a file; name it with --input."),
        ([*GOOD, "--json_key", "story"], "the record has no key 'story', only 'id', 'text'; mend"),
        ([*GOOD, "--input", "body.csv"], "body.csv has no column 'text'; choose one with --text_"),
        ([*GOOD, "--input", "cut.jsonl.gz"], "cut.jsonl.gz is cut short"),
        ([*GOOD, "--input", "blank.jsonl"], "blank.jsonl holds no text."),
    ],
)  # fmt: skip
def test_invalid_options_end_with_one_sentence_and_exit_code_2(tmp_path, capsys, argv, message):
    write(tmp_path / "a.jsonl", '{"id": "1", "text": "one"}\n')
    write(tmp_path / "a.txt", "one\n")
    write(tmp_path / "body.csv", "body\none\n")
    write(tmp_path / "blank.jsonl", "\n\n")
    write(tmp_path / "cut.jsonl.gz", gzip.compress(json_lines(TEXTS).encode())[:-20])

    assert main(argv) == 2

    lines = capsys.readouterr().err.splitlines()
    assert lines[-1].startswith("error: ")
    assert message in lines[-1]
    assert lines[:-1] == []
    assert not list(tmp_path.glob("out*.*[!s]"))


def test_plain_json_lines_need_neither_torch_nor_transformers(tmp_path):
    write(tmp_path / "a.jsonl", json_lines(TEXTS))
    code = (
        "import sys\n"
        "from llm.prepare.prepare import main\n"
        "code = main(sys.argv[1:])\n"
        "print(code, {'torch', 'transformers', 'datasets', 'pyarrow'} & {*sys.modules})"
    )

    done = subprocess.run([sys.executable, "-c", code, *GOOD], capture_output=True, text=True)

    assert done.stdout.splitlines()[-1] == "0 set()"
    assert done.stderr == ""
