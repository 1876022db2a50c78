"""What must hold of whole runs: same losses on any ranks, resume bit for bit."""

import dataclasses
import shutil
from types import SimpleNamespace
from typing import Any

import pytest

from llm.errors import LLMError, ParallelError
from llm.trainers.gpt.build_run import check_same_start
from llm.trainers.gpt.extensions import GPTConfig
from llm.trainers.gpt.training_run import TrainingRun
from tests.support.layouts import make_data_parallel
from tests.support.ranks import run_ranks, values
from tests.support.recovery import check_resume, weights_hash, without_times
from tests.support.training import NO_DROPOUT, Bench, Run

MORE = pytest.mark.layouts


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> Bench:
    return Bench(tmp_path_factory.mktemp("plain"), **NO_DROPOUT)


@pytest.fixture(scope="module")
def dropout(tmp_path_factory) -> Bench:
    return Bench(tmp_path_factory.mktemp("dropout"))


@pytest.fixture(scope="module")
def first(dropout) -> Run:
    return dropout.train_well("first")


@pytest.fixture(scope="module")
def alone(plain) -> Run:
    return plain.train_well("alone", per_device_train_batch_size=8, eval_metrics="accuracy")


@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        (1, {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}),
        pytest.param(2, {"per_device_train_batch_size": 4}, marks=MORE),
        (2, {"per_device_train_batch_size": 1, "global_batch_size": 8}),
        pytest.param(4, {"per_device_train_batch_size": 2}, marks=MORE),
    ],
)
def test_ranks_and_accumulation_do_not_change_the_losses(plain, alone, ranks, options):
    name = f"ranks{ranks}-" + "-".join(map(str, options.values()))
    run = plain.train_well(name, ranks=ranks, **options)

    assert len(run.losses) == 20
    assert run.losses == pytest.approx(alone.losses, rel=1e-5)
    for ours, theirs in zip(run.metrics, alone.metrics, strict=True):
        for key in ("step", "samples", "tokens", "learning_rate"):
            assert ours.get(key) == theirs.get(key)
        if "grad_norm" in ours:
            assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-4)


def test_two_fresh_runs_with_the_same_seed_are_bit_identical(dropout, first):
    second = dropout.train_well("second")
    assert without_times(first) == without_times(second)
    assert weights_hash(first.folder) == weights_hash(second.folder)


def test_another_seed_gives_another_run(dropout, first):
    assert dropout.train_well("other", seed=2).losses != first.losses


@pytest.mark.parametrize(
    ("ranks", "precision"),
    [
        (1, "no"),
        pytest.param(1, "fp16", marks=MORE),
        pytest.param(2, "no", marks=MORE),
        pytest.param(2, "fp16", marks=pytest.mark.extended),
        pytest.param(4, "no", marks=MORE),
    ],
)
def test_ten_steps_resume_ten_steps_are_bit_identical_to_twenty(dropout, ranks, precision):
    """Dropout is on, and a logging interval (3 steps) is open at the checkpoint."""
    options = {
        "ranks": ranks,
        "checkpointing_steps": 10,
        "gradient_accumulation_steps": 2,
        "logging_steps": 3,
        "eval_steps": 7,
        "lr_scheduler_type": "cosine",
        "mixed_precision": precision,
    }
    resumed = check_resume(dropout, f"straight-{ranks}-{precision}", **options)

    steps = [record["step"] for record in resumed.metrics]
    assert steps == sorted(set(steps))


def test_a_run_resumes_with_the_same_losses_under_another_world_size(plain, alone):
    options = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
    plain.train_well("elastic", max_train_steps=5, checkpointing_steps=5, **options)
    plain.train_well(
        "elastic",
        ranks=2,
        max_train_steps=20,
        change_on_resume="max_train_steps",
        checkpointing_steps=10,
        resume_from_checkpoint=True,
        # Two micro-batches a rank would double the global batch: accumulation gives way.
        **options,
    )
    run = Run(plain.folder / "elastic", [])
    assert run.losses == pytest.approx(alone.losses, rel=1e-5)
    assert run.metrics[-1]["samples"] == 160


def test_a_resumed_run_refuses_other_settings_all_in_one_sentence(plain):
    plain.train_well("fixed", max_train_steps=2, checkpointing_steps=1)
    options = {"max_train_steps": 2, "resume_from_checkpoint": True}
    with pytest.raises(LLMError) as refusal:
        plain.read("fixed", **options, seed=7, learning_rate=0.5, mixed_precision="bf16")
    assert "seed was 1 and is 7" in str(refusal.value)
    assert "learning_rate was 0.001 and is 0.5" in str(refusal.value)
    assert "mixed_precision was 'no' and is 'bf16'" in str(refusal.value)

    changes = {"mixed_precision": "bf16", "change_on_resume": ["mixed_precision"]}
    changes |= {"attention_implementation": "eager", "max_eval_steps": 1, "logging_steps": 2}
    allowed = plain.train_well(
        "fixed", **options, **changes, ranks=2, per_device_train_batch_size=2
    )
    assert (
        "The run continues with other settings: mixed_precision was 'no' and is 'bf16'; "
        "attention_implementation was None and is 'eager'; "
        "per_device_train_batch_size was 4 and is 2; max_eval_steps was None and is 1; "
        "number of ranks was 1 and is 2."
    ) in allowed.output


def test_a_finished_run_that_is_resumed_ends_at_once_with_the_same_results(plain):
    options = {"max_train_steps": 4, "checkpointing_steps": 4}
    first = plain.train_well("finished", **options)
    metrics, results = first.metrics, without_goodput(first)

    again = plain.train_well("finished", resume_from_checkpoint=True, **options)

    assert again.metrics == metrics
    assert without_goodput(again) == results


def without_goodput(run: Run) -> dict[str, Any]:
    """The results of a run, without its wall time, which every start prolongs."""
    goodput = run.read_json("goodput.json")["results"].keys()
    return {k: v for k, v in run.read_json("all_results.json").items() if k not in goodput}


def test_resume_without_a_checkpoint_starts_from_scratch_with_a_message(plain):
    run = plain.train_well("fresh", max_train_steps=2, resume_from_checkpoint=True)
    assert "the run starts from the beginning" in run.output
    assert len(run.losses) == 2


def refusal_of_different_starts(what: str) -> str:
    strategy = make_data_parallel()
    values = {"seed": 0, "places": "same"} | {what: strategy.rank}
    run = TrainingRun(
        **{
            **dict.fromkeys(field.name for field in dataclasses.fields(TrainingRun)),
            "config": GPTConfig(seed=values["seed"]),
            "samples": SimpleNamespace(num_windows=7),
            "data_digest": {"ends": "same", "places": values["places"], "sidecars": [None]},
        }
    )
    try:
        check_same_start(run)
    except ParallelError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(("what", "other"), [("seed", "'seed': 1"), ("places", "'data': 'same-1'")])
def test_ranks_that_would_start_differently_are_refused_on_all_of_them(what, other):
    sentences = values(run_ranks(refusal_of_different_starts, 2, what))
    assert sentences[0] == sentences[1]
    assert "Rank 0 starts from {'checkpoint': None, 'seed': 0, 'windows': 7" in sentences[0]
    assert other in sentences[0].partition("but rank 1 from")[2]


def test_checkpoints_that_cannot_be_used_are_not_trained_over(plain):
    run = plain.train_well("broken", max_train_steps=2, checkpointing_steps=1)
    for manifest in run.folder.glob("checkpoints/*/manifest.json"):
        manifest.write_text(manifest.read_text().replace('"format"', '"forma"'))

    with pytest.raises(LLMError, match="none of the 2 checkpoints"):
        plain.read("broken", resume_from_checkpoint=True)
    assert run.saved_steps == [1, 2]


def test_a_finished_run_without_checkpoints_is_not_trained_over(plain, alone):
    with pytest.raises(LLMError, match="holds a finished run without checkpoints"):
        plain.read("alone", resume_from_checkpoint=True)


def test_a_random_seed_is_logged_and_kept_on_resume(plain):
    run = plain.train_well("drawn", seed=None, max_train_steps=4, checkpointing_steps=2)
    shutil.rmtree(run.folder / "checkpoints" / "step_00000004")
    losses = run.losses
    again = plain.train_well(
        "drawn", seed=None, max_train_steps=4, checkpointing_steps=2, resume_from_checkpoint=True
    )
    assert "seed " in run.output
    assert again.losses == losses


def test_validation_does_not_depend_on_batch_or_ranks(plain, alone):
    options = {"per_device_eval_batch_size": 3, "model_name_or_path": alone.folder}
    options["eval_metrics"] = "accuracy"
    run = plain.train_well("evaluated", ranks=2, eval_only=True, **options)
    found = run.read_json("eval_results.json")
    expected = alone.read_json("all_results.json")
    assert found["loss"] == pytest.approx(expected["eval_loss"], rel=1e-6)
    assert found["accuracy"] == pytest.approx(expected["eval_accuracy"], rel=1e-6)
    assert found["perplexity"] == pytest.approx(expected["perplexity"], rel=1e-6)
    assert found["bits_per_byte"] == pytest.approx(expected["eval_bits_per_byte"], rel=1e-6)


def test_a_checkpoint_can_be_evaluated_alone(plain):
    options = {"max_train_steps": 4, "checkpointing_steps": 2, "eval_steps": 2}
    run = plain.train_well("saved", **options)
    by_step = {r["step"]: r["eval_loss"] for r in run.metrics if "eval_loss" in r}
    first = run.folder / "checkpoints" / "step_00000002"
    plain.train_well("saved", eval_only=True, resume_from_checkpoint=first, **options)
    assert run.read_json("eval_results.json")["loss"] == pytest.approx(by_step[2], rel=1e-6)
    plain.train_well("saved", eval_only=True, resume_from_checkpoint=True, **options)
    assert run.read_json("eval_results.json")["loss"] == pytest.approx(by_step[4], rel=1e-6)
