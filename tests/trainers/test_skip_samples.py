"""Samples that are left out on a resume: exactly these, and no other moves."""

import shutil

import pytest

from llm.checkpoint.load import find_newest_checkpoint
from llm.errors import LLMError
from tests.support.recovery import last_hash, without_times
from tests.support.training import NO_DROPOUT, Bench, Run

OPTIONS = {"max_train_steps": 10, "checkpointing_steps": 2, "async_checkpoint": False}


@pytest.fixture(scope="module")
def bench(tmp_path_factory) -> Bench:
    bench = Bench(tmp_path_factory.mktemp("bench"), **NO_DROPOUT)
    bench.train_well("plain", **OPTIONS)
    return bench


def cut_at(bench: Bench, name: str, step: int, *, source: str = "plain"):
    """A run as if it had been killed after the checkpoint of a step."""
    folder = shutil.copytree(bench.folder / source, bench.folder / name)
    for path in (folder / "checkpoints").iterdir():
        if int(path.name.removeprefix("step_")) > step:
            shutil.rmtree(path)
    return folder


@pytest.fixture(scope="module")
def without(bench):
    """A run that has left the samples out from its start; four samples make a step."""
    return bench.train_well("without", skip_samples="20:23,29:30", **OPTIONS)


def test_samples_left_out_on_a_resume_are_as_if_left_out_from_the_start(bench, without):
    cut_at(bench, "resumed", 4)

    resumed = bench.train_well(
        "resumed", skip_samples="20:23,29:30", resume_from_checkpoint=True, **OPTIONS
    )

    assert "left out: samples 20:23,29:30" in resumed.output
    assert last_hash(resumed) == last_hash(without)
    assert without_times(resumed) == without_times(without)
    plain = Run(bench.folder / "plain", [])
    assert resumed.losses[:5] == plain.losses[:5]
    assert resumed.losses[5:] != plain.losses[5:]


def test_later_resumes_need_not_repeat_the_ranges(bench, without):
    cut_at(bench, "later", 6, source="without")

    later = bench.train_well("later", resume_from_checkpoint=True, **OPTIONS)

    assert "left out: samples 20:23,29:30" in later.output
    assert without_times(later) == without_times(without)
    assert 'skip_samples = "20:23,29:30"' in (later.folder / "config.toml").read_text()
    newest = find_newest_checkpoint(later.folder / "checkpoints")
    assert newest.metadata["skip_samples"] == "20:23,29:30"


def test_a_resume_adds_ranges_to_those_before(bench):
    cut_at(bench, "added", 8, source="without")

    options = {**OPTIONS, "skip_samples": "29:30,36:38", "resume_from_checkpoint": True}
    assert str(bench.read("added", **options).skipped) == "20:23,29:30,36:38"


@pytest.mark.extended
def test_two_ranks_leave_out_the_same_samples_as_one(bench, without):
    options = {**OPTIONS, "per_device_train_batch_size": 2}
    both = bench.train_well("both", ranks=2, skip_samples="20:23,29:30", **options)

    assert both.losses == pytest.approx(without.losses, rel=1e-5)


def test_samples_that_were_trained_on_cannot_be_left_out_any_more(bench):
    cut_at(bench, "late", 6)

    said = "--skip_samples 23:25 names samples below 24, which.* resume from an earlier checkpoint"
    with pytest.raises(LLMError, match=said):
        bench.read("late", skip_samples="23:25", resume_from_checkpoint=True, **OPTIONS)
