"""`llm-trainers PROGRAM`: every program under one name, and help that is quick."""

import json
import subprocess
import sys

import pytest

from llm.__main__ import PROGRAMS, main
from tests.support.package import MODULES, name_of

STARTED_BY_RUNS = {"prepare.run_text", "tokenizers.sentencepiece_model"}


@pytest.fixture(autouse=True)
def command(monkeypatch):
    """The process of the command has its name."""
    monkeypatch.setattr(sys, "argv", ["/usr/bin/llm-trainers"])


def test_every_module_that_is_a_program_has_a_name_in_the_command():
    decorated = {name_of(path) for path in MODULES if "\n@program\n" in path.read_text()}
    targets = {program.target for program in PROGRAMS.values()}
    modules = {target.removeprefix("llm.").partition(":")[0] for target in targets}
    assert modules == decorated - {"__main__"} - STARTED_BY_RUNS | {"trainers.gpt.main"}


def test_python_starts_the_command_and_the_trainer_and_no_other_module():
    started = {name_of(path) for path in MODULES if '__name__ == "__main__"' in path.read_text()}
    assert started == {"__main__", "trainers.gpt.__main__"} | STARTED_BY_RUNS


# What each command shows first, and which of the heavy libraries are loaded by then.
SHOW = """
import contextlib, io, json, sys
import llm.tokenizers.load_tokenizer
from llm.__main__ import main

heavy = {"torch", "transformers", "tokenizers", "datasets", "pyarrow", "numpy", "bokeh"}
shown = []
for words in json.loads(sys.argv[1]):
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(out):
        with contextlib.suppress(SystemExit):
            main(words)
    shown.append([out.getvalue(), sorted(heavy & sys.modules.keys())])
print(json.dumps(shown))
"""


def test_help_and_refusals_have_the_commands_name_and_load_no_library():
    numeric = {"jobs"}  # which may load numpy, and so comes last
    helped = sorted(PROGRAMS, key=lambda name: name in numeric)
    refused = [["prepare", "--workers", "0"], ["prepare", "--input", "a.jsonl"]]
    commands = [["--help"], *refused, *([name, "--help"] for name in helped)]

    done = subprocess.run(
        [sys.executable, "-c", SHOW, json.dumps(commands)], capture_output=True, text=True
    )

    assert done.returncode == 0, done.stderr
    (text, none), *others = json.loads(done.stdout)
    assert none == []
    for name, program in PROGRAMS.items():
        assert f"  {name:<13}{program.purpose}\n" in text
    for words, (text, loaded) in zip(commands[1:], others, strict=True):
        begins = "error: " if words in refused else f"usage: llm-trainers {words[0]} "
        assert text.startswith(begins)
        assert set(loaded) <= ({"numpy"} if words[0] in numeric else set()), words


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["prepar"], "error: llm-trainers has no program named 'prepar'; did you mean prepare?\n"),
        (
            ["--nodes", "4"],
            "error: llm-trainers has no program named '--nodes'; llm-trainers --help lists them.\n",
        ),
    ],
)
def test_an_unknown_program_is_refused_in_a_sentence(words, sentence, capsys):
    assert main(words) == 2
    assert capsys.readouterr().err == sentence


def test_a_program_receives_its_arguments_and_returns_its_code(tmp_path, capsys):
    (tmp_path / "checkpoints").mkdir()

    assert main(["checkpoints", "--name", "runs/wiki"]) == 2
    assert "no option --name" in capsys.readouterr().err

    assert main(["checkpoints", str(tmp_path)]) == 0
    assert "holds no checkpoint" in capsys.readouterr().out


def test_the_trainer_says_once_which_value_of_an_option_counts(tmp_path):
    """It may restart itself first, with other settings of the allocator."""
    words = ["--seed", "1", "--seed", "2", "--model_type", "gpt2", "--train_file", "missing.txt"]
    words += ["--tokenizer_name", str(tmp_path), "--output_dir", str(tmp_path / "run")]
    command = [sys.executable, "-m", "llm.trainers.gpt", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "holds no tokenizer" in done.stdout
    assert done.stdout.count("--seed is given twice: 2 counts") == 1
