"""`llm-trainers sweep --ladder`: sizes, lengths, and branches of one run."""

import json
import math
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from llm.tools.jobs.jobs import main as write_job
from llm.tools.sweep.ladder import Rung, ladder_lines, ladder_rungs
from llm.tools.sweep.members import Base
from llm.tools.sweep.sweep import main
from tests.support.processes import wait_until
from tests.support.ranks import run_ranks
from tests.support.tokenizers import save_tiny_tokenizer, tiny_tokenizer
from tests.support.training import write_text

BASE = """
tokenizer_name = "tokenizer"
train_file = "a.txt"
block_size = 1024
"""

TOY = """
model_type = "gpt2"
config_overrides = "vocab_size=304,n_positions=32"
tokenizer_name = "tokenizer"
train_file = "train.txt"
data_cache_dir = "cache"
block_size = 32
global_batch_size = 4
per_device_train_batch_size = 4
per_device_eval_batch_size = 4
logging_steps = 1
report_to = ["none"]
device_peak_tflops = 1
seed = 1
"""


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """A folder with `base.toml` and a tokenizer, which is the current one."""
    monkeypatch.chdir(tmp_path)
    save_tiny_tokenizer(tmp_path / "tokenizer")
    (tmp_path / "base.toml").write_text(BASE)
    return tmp_path


def rungs(
    sizes: str, ratios: Sequence[float] = (20,), *arguments: str, output_dir: str = "s", **grid: str
) -> list[Rung]:
    base = Base(arguments=["--config", "base.toml", *arguments], folder=Path(output_dir))
    return ladder_rungs(base, sizes.split(), ratios, grid_options=grid)


def test_members_follow_from_the_size_of_their_model(folder):
    [small, medium, large] = rungs("60M 124M 355M")

    assert [rung.parameters.total for rung in (small, medium, large)] == [
        *(60_933_120, 124_439_808, 354_823_168)
    ]
    assert medium.member.name == "model_size=124M,tokens_per_parameter=20"
    assert medium.member.options == {
        **{"model_type": "gpt2", "num_layers": "12", "hidden_size": "768"},
        **{"num_attention_heads": "12", "max_duration": "20 tokens per parameter"},
        **{"global_batch_size": "256", "learning_rate": "0.00304", "weight_decay": "0.155"},
        **{"lr_scheduler_type": "linear", "warmup": "248879616 tokens", "betas": "0.9 0.95"},
    }
    assert [rung.batch_tokens for rung in (small, large)] == [192 * 1024, 384 * 1024]
    assert [rung.peak_rate for rung in (small, large)] == [0.00464, 0.0017]


def test_options_of_the_base_win_and_a_grid_makes_a_ladder_for_each_value(folder):
    words = ("--model_type", "llama", "--weight_decay", "0.1")
    [rung] = rungs("124M", (20,), *words, learning_rate="1e-3")
    assert rung.member.name == "model_size=124M,tokens_per_parameter=20,learning_rate=1e-3"
    assert rung.parameters.total == 122_896_128
    assert rung.peak_rate == 1e-3
    assert rung.member.options["learning_rate"] == "1e-3"
    assert not rung.member.options.keys() & {"weight_decay", "model_type"}


def test_lengths_of_a_size_are_branches_with_cooldowns_of_one_run(folder):
    [trunk, *branches] = rungs("124M", (40, 10, 20))

    assert trunk.member.name == "model_size=124M"
    assert trunk.batch_tokens == 256 * 1024  # of the geometric mean of the lengths
    options = trunk.member.options
    assert options["lr_scheduler_type"] == "constant_with_warmup"
    assert options["warmup"] == "124439808 tokens"  # of the shortest length
    every = int(options["keep_every"])
    assert every == 10 * 124_439_808 * 4 // 5 // trunk.batch_tokens
    assert options["max_duration"] == f"{4 * every} steps"
    assert options["save_interval"] == f"{every} steps"

    for branch, ratio in zip(branches, (10, 20, 40), strict=True):
        assert branch.member.parent == trunk.member.name
        assert branch.member.name == f"model_size=124M,tokens_per_parameter={ratio}"
        step = ratio // 10 * every
        assert branch.member.options["branch_from"] == f"s/model_size=124M/{step}"
        cooldown = int(branch.member.options["cooldown_tokens"])
        assert step * branch.batch_tokens + cooldown == branch.num_tokens == ratio * 124_439_808
        assert cooldown / branch.num_tokens == pytest.approx(0.2, abs=1e-3)
        assert branch.peak_rate == trunk.peak_rate


def test_a_trunk_keeps_the_intervals_of_the_base(folder):
    words = ("--checkpointing_minutes", "30", "--keep_checkpoints", "3")
    [trunk, *_] = rungs("124M", (10, 20), *words)
    assert not trunk.member.options.keys() & {"save_interval", "keep_checkpoints"}


def test_the_table_counts_the_tokens_before_a_branch_once(folder):
    members = rungs("124M", (10, 20, 40))
    num_tokens = sum(rung.num_tokens - rung.num_parent_tokens for rung in members)
    assert num_tokens == pytest.approx(124_439_808 * (32 + 2 + 4 + 8), rel=1e-3)
    lines = ladder_lines(members)
    assert lines[0].split() == [
        *("member", "parameters", "layers,", "width,", "heads", "tokens", "batch"),
        *("learning", "rate", "FLOPs", "(6", "N", "D)"),
    ]
    assert lines[2].split() == [
        *("model_size=124M,tokens_per_parameter=10", "124,439,808", "12,", "768,", "12"),
        *("1,244,398,080", "262,144"),
        *(f"{members[0].peak_rate:g}", f"{6 * 124_439_808**2 * 2:.3g}"),
    ]
    assert lines[-1] == (
        "The ladder takes 4.27e+18 FLOPs, and separate runs of these lengths 6.5e+18: the members "
        "of a size are branches of one run."
    )


def test_a_size_with_another_shape_than_model_size_gives_is_announced(folder):
    [gpt2] = rungs("124M")
    assert (gpt2.shape, gpt2.remark) == ((12, 768, 12), "")
    [llama] = rungs("124M", (20,), "--model_type", "llama")
    assert llama.shape != (12, 768, 12)
    assert llama.remark == (
        "--model_size 124M alone has 12 layers of width 768 with 12 heads, 137,644,800 "
        "parameters: the ladder fits the number of parameters, and counts the tokens of the "
        "tokenizer."
    )
    assert ladder_lines([llama])[-1] == llama.remark


def test_a_tokenizer_with_more_tokens_than_the_model_counts(folder):
    num_tokens = len(tiny_tokenizer())
    words = ("--model_type", "llama", "--config_overrides")
    [rung] = rungs("1M", (20,), *words, "vocab_size=100")
    [same] = rungs("1M", (20,), *words, f"vocab_size={num_tokens}")
    assert rung.parameters == same.parameters
    assert rung.parameters.total == pytest.approx(1e6, rel=0.05)
    # The trainer enlarges the model itself, if the user sets its vocabulary.
    assert rung.member.options == same.member.options


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["--tokens_per_parameter", "10"], "--tokens_per_parameter needs --ladder"),
        (["--ladder", "60Q"], "--ladder 60Q: a size is a number of parameters such as 60M or 1.3B"),
        (["--ladder", "1M"], "--ladder 1M: No gpt2 with a vocabulary of 50,257 tokens has 1M par"),
        (["--ladder", "60M", "60M"], "--ladder has a value twice"),
        (["--ladder", "60M", "--", "--num_layers", "3"], "--ladder sets --num_layers, or does no"),
        (["--ladder", "60M", "--", "--max_train_steps", "3"], "--ladder sets --max_duration, or "),
        (["--ladder", "60M", "--", "--preset", "pretrain"], "--ladder sets --preset, or does not "),
        (["--ladder", "60M", "--", "--model_type", "bloom"], "this model is bloom"),
        (["--ladder", "60M", "--", "--optimizer", "sgd"], "for AdamW and one model, not for --opt"),
        (
            ["--ladder", "60M", "--", "--config_overrides", "n_layer=2"],
            "--config_overrides n_layer=2 sets layers, width or heads, which the ladder chooses",
        ),
        (
            ["--ladder", "60M", "--tokens_per_parameter", "10", "10.01"],
            "which would need 1001 checkpoints, one every 3.7 st",
        ),
        (
            ["--ladder", "60M", "--tokens_per_parameter", "1", "2", "--", "--keep_every", "3"],
            "--ladder sets --keep_every, or does not go with it",
        ),
        (["--ladder", "60M", "124M", "--max_members", "1"], "has 2 members, and --max_members"),
    ],
)
def test_a_ladder_that_cannot_work_starts_nothing(argv, sentence, folder, capsys):
    assert main(["base.toml", *argv]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert sentence in error
    assert sorted(path.name for path in folder.iterdir()) == ["base.toml", "tokenizer"]


def test_an_array_of_jobs_has_the_branches_once_their_trunks_have_finished(folder, capsys):
    argv = ["sweep", "slurm", "--time", "1:00:00", "--gpus_per_node", "1", "--", "base.toml"]
    argv += ["--output_dir", "s", "--ladder", "60M", "124M", "--tokens_per_parameter", "10", "20"]
    assert write_job(argv) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith("#!/bin/bash")
    assert printed.out.count("OPTIONS+=(") == 2
    assert "--branch_from" not in printed.out
    assert "Left out: 4 branches of runs that have not finished; write the" in printed.err


@pytest.fixture
def toy(folder) -> Path:
    """A folder with a toy base, which is the current one."""
    write_text(folder / "train.txt", lines=300)
    (folder / "base.toml").write_text(TOY)
    return folder


def train(argv: list[str]) -> int:
    from llm.trainers.gpt.main import main as train_main

    return train_main(argv)


def train_members(members: Sequence[Rung], output_dir: str = "s") -> None:
    """Train members one after another, as the sweep does."""
    base = Base(arguments=["--config", "base.toml"], folder=Path(output_dir))
    for rung in members:
        (outcome,) = run_ranks(train, 1, base.trainer_arguments(rung.member), timeout=120)
        assert outcome.value == 0, outcome.output


def read(name: str, file: str, output_dir: str = "s") -> dict[str, Any]:
    return json.loads((Path(output_dir) / name / file).read_text())


def test_members_of_a_toy_ladder_have_their_sizes_and_lengths(toy):
    members = [*rungs("70K 120K", (0.01,)), *rungs("170K", (0.01, 0.02))]
    train_members(members)

    for rung in members:
        results = read(rung.member.name, "all_results.json")
        assert results["tokens"] == math.ceil(rung.num_tokens / 32) * 32  # whole samples
        start = json.loads(
            (Path("s") / rung.member.name / "events.jsonl").read_text().splitlines()[0]
        )
        assert start["parameters"] == rung.parameters.total


@pytest.mark.faults
def test_killed_trunks_and_branches_resume_to_the_bits_of_straight_runs(toy):
    members = rungs("170K", (0.05, 0.1))
    argv = [sys.executable, "-m", "llm", "sweep", "base.toml", "--output_dir", "s"]
    argv += ["--ladder", "170K", "--tokens_per_parameter", "0.05", "0.1"]
    for rung in members[0], members[2]:  # the trunk, and the longer branch
        metrics = Path("s") / rung.member.name / "metrics.jsonl"
        process = subprocess.Popen(argv, stdout=subprocess.DEVNULL, start_new_session=True)
        wait_until(lambda: metrics.exists() and metrics.read_text().count("\n") > 4)  # noqa: B023
        process.send_signal(signal.SIGKILL)
        assert process.wait(timeout=60) == -signal.SIGKILL
        wait_until(lambda: read(rung.member.name, "status.json")["status"] != "running")  # noqa: B023
        assert read(rung.member.name, "status.json")["status"] == "preempted"
    assert subprocess.run(argv, timeout=300).returncode == 0

    train_members(rungs("170K", (0.05, 0.1), output_dir="t"), "t")
    for rung in members:
        expected = load_file(f"t/{rung.member.name}/model.safetensors")
        weights = load_file(f"s/{rung.member.name}/model.safetensors")
        assert all(weights[key].equal(expected[key]) for key in expected)
    for rung in members:
        assert (
            read(rung.member.name, "all_results.json")["eval_loss"]
            == (read(rung.member.name, "all_results.json", "t")["eval_loss"])
        )


@pytest.mark.slow
def test_a_ladder_of_three_sizes_trains_and_is_left_alone_when_repeated(toy, capsys):
    argv = ["base.toml", "--output_dir", "s", "--ladder", "70K", "120K", "170K"]
    argv += ["--tokens_per_parameter", "0.01", "0.02"]
    assert main(argv) == 0
    table = capsys.readouterr().out
    assert table.count(" finished  ") == 9
    times = {path: path.stat().st_mtime_ns for path in Path("s").glob("*/status.json")}
    assert len(times) == 9
    assert main(argv) == 0
    assert {path: path.stat().st_mtime_ns for path in Path("s").glob("*/status.json")} == times
