"""The dry run of the tutorial, run as the page shows it, and the plan that it shows."""

import json
import os
import re
import shlex
import shutil
from pathlib import Path

import pytest

from llm.tools.jobs.jobs import main as jobs
from llm.tools.plan.plan import main as plan
from tests.support.package import ROOT
from tests.support.programs import run_program
from tests.support.ranks import run_ranks, values


def commands_of_dry_run(page: str) -> list[list[str]]:
    text = (ROOT / "docs/tutorials" / page).read_text(encoding="utf-8")
    (block,) = re.findall(r'^```bash title="dry run"\n(.*?)^```', text, re.DOTALL | re.MULTILINE)
    return [shlex.split(line) for line in re.sub(r"\\\n\s*", "", block).splitlines()]


def run_in_turn(folder: Path, commands: list[list[str]]) -> list[int]:
    """Run programs of the package in a folder, one after the other in this process."""
    os.chdir(folder)
    return [run_program(words) for _, *words in commands]


@pytest.mark.slow
def test_the_dry_run_of_the_llama_trains_twenty_steps(tmp_path):
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    commands = commands_of_dry_run("llama-1b.md")
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(tmp_path / "cache")}

    (outcome,) = run_ranks(run_in_turn, 1, tmp_path, commands, environment=offline, timeout=280)

    (codes,) = values([outcome])
    assert codes == [0, 0, 0], outcome.output
    assert "10,532,160 parameters" in outcome.output
    assert "length: 20 steps" in outcome.output
    assert "preset pretrain: " in outcome.output
    lines = (tmp_path / "runs/dry-run/metrics.jsonl").read_text(encoding="utf-8").splitlines()
    losses = [record["loss"] for record in map(json.loads, lines) if "loss" in record]
    assert len(losses) == 4
    assert losses[-1] < losses[0] - 0.1
    assert (tmp_path / "runs/dry-run/model.safetensors").is_file()


def test_the_plan_of_the_llama_is_the_one_on_its_page(capsys, monkeypatch):
    """Its sizes; the times depend on the versions of libraries in the last digits."""
    monkeypatch.chdir(ROOT)
    shown = (ROOT / "examples/llama-1b/plan.txt").read_text(encoding="utf-8").splitlines()

    options = ["--nodes", "8", "--gpus_per_node", "8", "--device", "h100-80gb"]

    assert plan(["examples/llama-1b/train.toml", *options]) == 0

    printed = capsys.readouterr().out.splitlines()
    assert printed[:3] == shown[:3]
    [total, in_page] = (
        float(re.search(r"total +([\d.]+) GiB", "\n".join(lines))[1]) for lines in (printed, shown)
    )
    assert total == pytest.approx(in_page, rel=0.05)
    assert "1,086,932,992 parameters, on 8 nodes of 8 h100-80gb: 64 ranks" in printed[0]
    assert any(line.startswith("It fits: ") for line in shown)
    assert any(line.startswith("22,000,001,024 tokens take ") for line in shown)


@pytest.mark.parametrize(
    ("file", "nodes", "gpus", "size"),
    [("llama-1b/train.toml", 16, 8, 4), ("gpt2-small.toml", 8, 4, 15)],
)
def test_more_gpus_than_a_tutorial_has_take_the_smaller_micro_batch(
    file, nodes, gpus, size, capsys, monkeypatch
):
    monkeypatch.chdir(ROOT)
    command = ["slurm", "--gpus_per_node", str(gpus), "--nodes"]
    trainer = ["--", "--config", f"examples/{file}"]

    assert jobs([*command, str(nodes // 2), *trainer]) == 0
    assert jobs([*command, str(nodes), *trainer]) == 2
    smaller = f"--per_device_train_batch_size {size}"
    assert f"; take {smaller}, which keeps the batch, or " in capsys.readouterr().err
    assert jobs([*command, str(nodes), *trainer, *smaller.split()]) == 0
    pages = [
        (ROOT / "docs" / name).read_text(encoding="utf-8")
        for name in ("tutorials/llama-1b.md", "guides/gpt.md")
    ]
    assert any(f"add\n`{smaller}`" in page for page in pages)
