"""Arguments with line breaks, blanks and odd bytes in job scripts."""

import re
import subprocess
from pathlib import Path

import pytest

from llm.tools.jobs import jobs
from llm.tools.jobs.jobs import main

TRAINER = ["--model_name_or_path", "gpt2", "--train_file", "a.txt", "--output_dir", "runs/a"]
PREPARE = ["--tokenizer_name", "gpt2", "--output_prefix", "b", "--input", "a.txt"]


@pytest.fixture(autouse=True)
def plan(monkeypatch):
    monkeypatch.setattr(jobs, "plan_run", lambda *_: ([], None))


def read_options(script: Path) -> list[bytes]:
    """The elements of OPTIONS as bash reads them."""
    block = re.search(r"(?ms)^OPTIONS=\($.*?^\)$", script.read_text())[0]
    command = f'{block}\nprintf "%s\\0" "${{OPTIONS[@]}}"'
    return subprocess.run(["bash", "-c", command], stdout=subprocess.PIPE).stdout.split(b"\0")[:-1]


@pytest.mark.parametrize("scheduler", ["slurm", "pbs"])
@pytest.mark.parametrize("words", [[], ["prepare"]], ids=["training", "preparation"])
def test_the_head_of_a_script_has_one_line_for_its_command(words, scheduler, tmp_path):
    path = tmp_path / "job"
    argv = [*words, scheduler, "--nodes", "4\n", "--output", str(path)]
    assert main([*argv, "--", *(PREPARE if words else TRAINER)]) == 0
    head = " ".join(["jobs", *words, scheduler])
    assert f"# Made by: llm-trainers {head} --nodes $'4\\x0a' -- OPTIONS\n#\n" in path.read_text()
    assert subprocess.run(["bash", "-n", path]).returncode == 0


def test_bash_reads_the_options_of_a_preparation_as_they_were_typed(tmp_path):
    options = [*PREPARE[:3], "b\nc 'd'", "--input", "a\udcff,$HOME"]  # a byte that is not UTF-8
    path = tmp_path / "job"
    assert main(["prepare", "slurm", "--output", str(path), "--", *options]) == 0
    assert read_options(path) == [text.encode(errors="surrogateescape") for text in options]


def test_a_blank_in_a_number_stays_outside_of_a_variable(tmp_path):
    path = tmp_path / "job"
    options = [*TRAINER, "--tensor_parallel_size", " 4", "--pipeline_parallel_size", "1"]
    assert main(["slurm", "--output", str(path), "--", *options]) == 0
    assert read_options(path)[-5:-1] == [
        *(b"--tensor_parallel_size", b" 4", b"--pipeline_parallel_size", b"1")
    ]
    assert '"${PP_SIZE:-1}"' in path.read_text()
