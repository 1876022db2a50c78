"""The dry run of the tutorial, run as the page shows it, and the plan that it shows."""

import json
import os
import re
import shlex
import shutil
from pathlib import Path

import pytest

from llm.config.options import fields
from llm.tools.jobs.jobs import main as jobs
from llm.tools.plan.options import PlanOptions
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
    ("file", "nodes", "gpus", "micro_batches"),
    [
        ("llama-1b/train.toml", 4, 8, "4 micro-batches of 4"),
        ("llama-1b/train.toml", 16, 8, "1 micro-batch of 4"),
        ("llama-1b/train.toml", 8, 4, "4 micro-batches of 4"),
        ("gpt2-small.toml", 1, 8, "10 micro-batches of 6"),
        ("gpt2-small.toml", 10, 8, "1 micro-batch of 6"),
    ],
)
def test_an_example_fits_the_nodes_that_its_page_names(
    file, nodes, gpus, micro_batches, capsys, monkeypatch
):
    monkeypatch.chdir(ROOT)
    layout = ["--nodes", nodes, "--gpus_per_node", gpus, "--device", "a100-40gb"]

    assert plan([f"examples/{file}", *map(str, layout)]) == 0
    printed = capsys.readouterr().out
    assert f" in {micro_batches} on each rank\n" in printed
    assert "\nIt fits: " in printed


def test_a_number_of_gpus_that_does_not_fit_is_answered_as_the_page_says(capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    layout = ["slurm", "--nodes", "8", "--gpus_per_node", "4"]
    command = [*layout, "--", "--config", "examples/gpt2-small.toml"]
    smaller = "--per_device_train_batch_size 5"

    assert jobs(command) == 2
    assert f"; take {smaller}, which keeps the batch, or " in capsys.readouterr().err
    assert jobs([*command, *smaller.split()]) == 0
    assert f"add\n`{smaller}`" in (ROOT / "docs/guides/gpt.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("nodes", "gpus", "device", "of_plan", "of_page"),
    [
        ("8", "4", "a100-40gb", r"total +([\d.]+) GiB of 37\.43", r"([\d.]+) GiB of 37\.43 GiB"),
        ("8", "4", "a100-40gb", r"tokens take ([\d.]+) hours", r"8 nodes, ([\d.]+) hours"),
        ("2", "8", "h100-80gb", r"peak: ([\d,]+) tokens/s", r"plan for `--nodes 2`: ([\d,]+) tok"),
    ],
    ids=["memory", "hours", "speed"],
)
def test_figures_in_the_text_of_the_llama_are_of_its_plans(
    nodes, gpus, device, of_plan, of_page, capsys, monkeypatch
):
    """The times depend on the versions of libraries in the last digits."""
    monkeypatch.chdir(ROOT)
    page = (ROOT / "docs/tutorials/llama-1b.md").read_text(encoding="utf-8")
    layout = ["--nodes", nodes, "--gpus_per_node", gpus, "--device", device]

    assert plan(["examples/llama-1b/train.toml", *layout]) == 0

    printed, shown = (
        float(re.search(pattern, text)[1].replace(",", ""))
        for pattern, text in ((of_plan, capsys.readouterr().out), (of_page, page))
    )
    assert printed == pytest.approx(shown, rel=0.05)


def test_the_page_of_the_llama_names_the_devices_of_the_plan():
    page = (ROOT / "docs/tutorials/llama-1b.md").read_text(encoding="utf-8")
    sentence = re.search(r"`--device` is ([^.]*)\.", page)[1]
    [device] = (field for field in fields(PlanOptions) if field.name == "device")
    assert sorted(re.findall(r"`(.+?)`", sentence)) == sorted(device.choices)


def test_the_plan_of_the_llama_of_8b_is_the_one_on_its_page(capsys):
    """The times depend on the versions of libraries in the last digits."""
    page = (ROOT / "docs/compare.md").read_text(encoding="utf-8")
    [command, shown] = re.findall(r"^```\w*\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    program, name, *options = shlex.split(command.replace("\\\n", ""))

    assert (program, name) == ("llm-trainers", "plan")
    assert plan(options) == 0

    printed = capsys.readouterr().out
    assert printed.splitlines()[:3] == shown.splitlines()[:3]
    for pattern in (r"total +([\d.]+) GiB of 75\.14", r"peak: ([\d,]+) tokens/s"):
        figures = [re.search(pattern, text)[1].replace(",", "") for text in (printed, shown)]
        assert float(figures[0]) == pytest.approx(float(figures[1]), rel=0.05)
