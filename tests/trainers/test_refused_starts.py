"""Whatever is refused before training leaves the run's folder as it was."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.faults import Fault
from tests.support.token_files import random_documents, write_pair
from tests.support.training import Bench

OPTIONS = {
    "train_file": None,
    "max_train_steps": 2,
    "checkpointing_steps": 2,
    "report_to": "tensorboard",
}
RESUME, OVERWRITE = "resume_from_checkpoint", "overwrite_output_dir"

REFUSALS: dict[str, tuple[str, dict[str, Any], str]] = {
    "a resume without access to the Hub": (
        RESUME,
        {"push_to_hub": True},
        "--push_to_hub needs you to be known to the Hub",
    ),
    "a resume with validation data of one token": (
        RESUME,
        {"valid_data_path": "one", "change_on_resume": "valid_data_path"},
        "The validation text has 1 token(s)",
    ),
    "a resume with another layout of the optimizer": (
        RESUME,
        {"data_parallel": "diloco", "change_on_resume": "data_parallel"},
        "was written with --data_parallel allreduce",
    ),
    "a resume of a run that shall end before its checkpoint": (
        RESUME,
        {"max_train_steps": 1, "change_on_resume": "max_train_steps"},
        "step_00000002 has 2 steps, more than the 1 of this run: give a greater length",
    ),
    "a new run with validation data of one token": (
        OVERWRITE,
        {"valid_data_path": "one"},
        "The validation text has 1 token(s)",
    ),
}


@pytest.fixture(scope="module")
def bench(tmp_path_factory) -> Bench:
    bench = Bench(tmp_path_factory.mktemp("refused"), lines=2)
    write_pair(bench.folder / "text", random_documents(20, seed=1))
    write_pair(bench.folder / "one", [[1]])
    bench.train_well("finished", **OPTIONS, **data(bench, "text"))
    return bench


def data(bench: Bench, validation: str) -> dict[str, Any]:
    return {
        "train_data_path": bench.folder / "text",
        "valid_data_path": bench.folder / validation,
    }


def content(folder: Path) -> dict[str, bytes]:
    """The files of a folder; its lock names the last process that has locked it."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != ".lock"]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


@pytest.mark.parametrize("name", REFUSALS)
def test_a_start_that_is_refused_changes_nothing(bench, monkeypatch, name):
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setenv("HF_HOME", str(bench.folder / "hub"))
    way, options, sentence = REFUSALS[name]
    options = {**OPTIONS, way: True, **options}
    options |= data(bench, options.pop("valid_data_path", "text"))
    before = content(bench.folder / "finished")

    run = bench.train("finished", **options)

    assert run.codes == [2], run.output
    assert sentence in run.output
    assert content(run.folder) == before


def test_a_tracker_that_cannot_be_opened_does_not_remove_the_former_run(bench):
    opening = "llm.trainers.gpt.train:connect_trackers"
    before = content(bench.folder / "finished")

    run = bench.train(
        "finished",
        faults=[Fault(at=opening, what="out of memory")],
        overwrite_output_dir=True,
        **OPTIONS,
        **data(bench, "text"),
    )

    assert run.codes == [2], run.output
    assert content(run.folder) == before


@pytest.mark.parametrize(
    "function", ["collect_model_files", "connect_trackers", "open_tensorboard"]
)
def test_an_error_of_rank_0_is_printed_once_and_loses_no_rank(bench, function):
    fault = Fault(at=f"llm.trainers.gpt.train:{function}", what="out of memory", rank=0)

    run = bench.train(function, ranks=2, faults=[fault], **OPTIONS, **data(bench, "text"))

    assert run.codes == [2, 2], run.output
    assert run.output.count("error: ") == 1, run.output
    assert "error: Out of memory" in run.outcomes[0].output


def test_a_start_that_is_refused_makes_no_folder(bench):
    run = bench.train("new", **OPTIONS, **data(bench, "one"))

    assert run.codes == [2], run.output
    assert not run.folder.exists()
