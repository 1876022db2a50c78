"""The page of a run's folder explains what a run writes into it."""

import re
from typing import get_args

from llm.runtime.logging import Kind
from tests.support.package import ROOT
from tests.support.training import Bench

PAGE = (ROOT / "docs/run-folder.md").read_text(encoding="utf-8")


def explained(name: str) -> set[str]:
    """The words in code before the colon of each item below a heading."""
    section = PAGE.split(f"\n## {name}\n")[1].split("\n## ")[0]
    names = re.findall(r"^- (`[^:(]*)", section, flags=re.MULTILINE)
    return {word for item in names for word in re.findall(r"`([^`]+)`", item)}


def test_the_page_of_the_runs_folder_explains_every_key_that_is_written(tmp_path):
    run = Bench(tmp_path, lines=60).train_well(max_train_steps=2, checkpointing_steps=2)

    written = {key for line in run.lines for key in line}
    assert {"loss", "eval_loss", "memory"} <= written <= explained("metrics.jsonl")
    goodput = run.read_json("goodput.json")["results"].keys()
    assert goodput == explained("goodput.json")
    assert run.read_json("all_results.json").keys() - goodput <= explained("all_results.json")
    assert run.read_json("status.json").keys() == explained("status.json")
    assert {*get_args(Kind)} == explained("events.jsonl")

    manifest = run.read_json("checkpoints/step_00000002/manifest.json")
    [item] = [line for line in PAGE.splitlines() if line.startswith("- `manifest.json`:")]
    assert manifest.keys() - set(re.findall("`([a-z_]+)`", item)) == {"files", "checksum"}
    assert f"`format` ({manifest['format']})" in item
