"""Runs of Weights & Biases, with a stand-in for its library."""

import json
import sys
from pathlib import Path

import pytest

from llm.errors import ConfigError
from llm.trainers.gpt import main, trackers
from llm.trainers.gpt.main import parse_args
from tests.support.ranks import run_ranks
from tests.support.training import Bench

STAND_IN = """
import json, os, types

config = types.SimpleNamespace(update=lambda values, allow_val_change: None)

class Run:
    def __init__(self, id):
        self.id = id
    def log(self, values, step):
        pass
    def finish(self):
        pass

def init(**arguments):
    if not os.environ["WANDB_API_KEY"]:
        raise RuntimeError("No API key configured.")
    with open(os.environ["CALLS"], "a") as file:
        file.write(json.dumps(arguments) + "\\n")
    return Run(arguments.get("id") or f"id-{len(open(os.environ['CALLS']).readlines())}")
"""


class Wandb:
    """A bench whose trainer finds the stand-in, and the calls of `wandb.init` so far."""

    def __init__(self, folder: Path) -> None:
        self.bench = Bench(folder)
        self.library, self.calls_file = folder / "library", folder / "calls"
        (self.library / "wandb").mkdir(parents=True)
        (self.library / "wandb" / "__init__.py").write_text(STAND_IN)

    def train(self, name: str, *, environment: dict[str, str], **options) -> tuple[int, str]:
        """Train some steps; returns the exit code and the output."""
        command = self.bench.command(
            name, report_to="wandb", logging_steps=9, checkpointing_steps=2, **options
        )
        environment = {"CALLS": str(self.calls_file), **environment}
        (outcome,) = run_ranks(_main, 1, self.library, command, environment=environment)
        assert outcome.error is None, outcome.error
        return outcome.value, outcome.output

    def calls(self) -> list[dict[str, str]]:
        """The arguments of each call of `wandb.init`."""
        return [json.loads(line) for line in self.calls_file.read_text().splitlines()]


def _main(library: Path, argv: list[str]) -> int:
    sys.path.insert(0, str(library))
    trackers.get_available_trackers = lambda: ["wandb"]
    return main.main(argv)


@pytest.fixture(scope="module")
def wandb(tmp_path_factory) -> Wandb:
    return Wandb(tmp_path_factory.mktemp("wandb"))


def test_a_resume_continues_its_wandb_run_and_a_branch_starts_another(wandb):
    key = {"WANDB_API_KEY": "k", "WANDB_PROJECT": ""}
    mine = {**key, "WANDB_PROJECT": "mine"}
    folder, branch = wandb.bench.folder / "run", wandb.bench.folder / "branch"
    again = {"max_train_steps": 4, "resume_from_checkpoint": True}

    for name, environment, options in (
        ("run", mine, {"max_train_steps": 2}),
        ("run", key, again),
        ("run", key, {**again, "project_name": "other"}),
        ("branch", key, {"max_train_steps": 4, "branch_from": folder / "2"}),
        ("run", key, {"max_train_steps": 2, "overwrite_output_dir": True}),
    ):
        code, output = wandb.train(name, environment=environment, **options)
        assert code == 0, output

    assert wandb.calls() == [
        {"project": "mine", "dir": str(folder)},
        {"project": "mine", "dir": str(folder), "id": "id-1", "resume": "allow"},
        {"project": "other", "dir": str(folder)},
        {"project": "other", "dir": str(branch)},  # options of its parent
        {"project": "llm", "dir": str(folder)},
    ]


def test_a_tracker_that_cannot_be_opened_is_refused_with_its_reason(wandb):
    code, output = wandb.train("keyless", environment={"WANDB_API_KEY": ""}, max_train_steps=2)

    assert code == 2
    assert "error: --report_to wandb: No API key configured. Fix that" in output


def test_a_project_without_a_tracker_that_has_projects_is_refused():
    command = ["--train_file", "a.txt", "--model_name_or_path", "gpt2", "--project_name", "mine"]
    with pytest.raises(ConfigError, match="--project_name is for trackers such as wandb"):
        parse_args(command)
    parse_args([*command, "--report_to", "tensorboard", "wandb"])
