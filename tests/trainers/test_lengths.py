"""Budgets in tokens and batches that grow: whole runs, compared with runs in steps and samples."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from llm.checkpoint.format import Checkpoint
from llm.errors import CheckpointError, LLMError
from llm.trainers.gpt.extensions import GPTConfig
from llm.trainers.gpt.training_run import read_inherited_global_batch
from tests.support.faults import Fault
from tests.support.recovery import check_same, kill_and_go_on, weights_hash, without_times
from tests.support.training import NO_DROPOUT, Bench, Run

STEP = "llm.trainers.gpt.loop:Trainer.train_step"

# With 32 tokens a sample the borders lie at samples 8 and 20: two steps of 4 samples, two of 8,
# and the rest of 16.
GROWING = {"global_batch_size": "4@0,8@256,16@640", "max_train_steps": 6}
FAULTS = [pytest.mark.faults]
STOPS = [4, 8, 16, 24, 40, 56]


@pytest.fixture(scope="module")
def bench(tmp_path_factory) -> Bench:
    return Bench(tmp_path_factory.mktemp("bench"))


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> Bench:
    return Bench(tmp_path_factory.mktemp("plain"), n_layer=4, **NO_DROPOUT)


@pytest.fixture(scope="module")
def alone(plain) -> Run:
    return plain.train_well("alone", per_device_train_batch_size=2, **GROWING)


def test_lengths_in_tokens_are_those_in_samples_and_steps(bench):
    wsd = {"lr_scheduler_type": "warmup_stable_decay"}
    samples = bench.train_well(
        "samples",
        max_train_steps=None,
        max_train_samples=38,
        num_warmup_samples=10,
        num_decay_steps=4,
        eval_steps=3,
        checkpointing_steps=2,
        **wsd,
    )
    tokens = bench.train_well(
        "tokens",
        max_train_steps=None,
        max_train_tokens="1.2K",  # 37.5 samples
        num_warmup_tokens=320,
        num_decay_tokens=448,  # three steps of 4 samples, and the last one of 2
        eval_tokens=384,
        checkpointing_tokens=256,
        **wsd,
    )

    assert without_times(tokens) == without_times(samples)
    assert weights_hash(tokens.folder) == weights_hash(samples.folder)
    rates = [record["learning_rate"] for record in tokens.metrics]
    assert rates == pytest.approx([0, 4e-4, 8e-4, 1e-3, 1e-3, 1e-3, 1e-3, 7.5e-4, 5e-4, 2.5e-4])
    assert tokens.metrics[-1]["samples"] == 38
    assert tokens.saved_steps == samples.saved_steps == [2, 4, 6, 8, 10]
    assert [r["step"] for r in tokens.metrics if "eval_loss" in r] == [3, 6, 9, 10]


def test_tokens_per_parameter_set_the_budget_and_the_log_says_its_cost(bench):
    options = {"max_train_steps": None, "logging_steps": 3}
    run = bench.train_well("ratio", tokens_per_parameter=0.03, **options)

    # 0.03 of 37,760 parameters are 1,132.8 tokens, which the 36th sample reaches. A token takes
    # 6 operations for each of 34,816 weights in products, and 24,576 in attention.
    line = "budget: 1,152 tokens, 0.03051 for each of 37,760 parameters; 2.69e+08 FLOPs"
    assert line in run.output
    assert pytest.approx(2.69e8, rel=1e-3) == 1152 * (6 * 34_816 + 24_576)
    assert "length: 9 steps, 36 samples" in run.output


def test_a_run_that_repeats_its_data_more_than_four_times_is_warned(bench):
    batch = {"per_device_train_batch_size": 64, "max_train_steps": None}
    long = {**batch, "max_train_samples": 1152}
    warned = bench.train_well("warned", **long)
    allowed = bench.train_well("allowed", max_epochs=5, **long)
    short = bench.train_well("short", max_train_tokens=34_688, **batch)

    # Four times 271 windows of 32 tokens are 34,688 tokens.
    assert "1,152 samples, 4.251 epochs" in warned.output
    assert (
        "The run takes 4.3 epochs of its data, and text that is repeated more than 4 times "
        "teaches little: set --max_duration to '34688 tokens' at most, or allow the epochs with "
        "--max_epochs 5.\n"
    ) in warned.output
    assert "1,084 samples, 4 epochs" in short.output
    assert "teaches little" not in allowed.output + short.output


def test_warmup_and_decay_longer_than_the_budget_are_refused(bench):
    options = {"max_train_tokens": "2K", "num_warmup_tokens": "1K", "num_decay_tokens": "1.5K"}
    options |= {"lr_scheduler_type": "warmup_stable_decay", "max_train_steps": None}
    with pytest.raises(LLMError, match=r"--decay.*longer than the run of 16 steps"):
        bench.read(**options)


def test_a_growing_batch_reads_the_same_samples_in_the_same_order(plain, alone):
    assert [record["samples"] for record in alone.metrics if "samples" in record] == STOPS
    assert [record["tokens"] for record in alone.metrics if "tokens" in record] == [
        32 * stop for stop in STOPS
    ]
    for size, times in ((4, 2), (8, 2), (16, 2)):
        assert alone.output.count(f"global batch size: {size:5d}") == times
    assert "batch: 2 samples per device x 1 rank x 2 micro-batches = 4 samples" in alone.output
    assert "batch from step 5 on: 2 samples per device x 1 rank x 8 micro-batches" in alone.output
    # Before the first border it is the run of a plain batch, bit for bit.
    first = plain.train_well(
        "first", per_device_train_batch_size=2, global_batch_size=4, max_train_steps=6
    )
    assert alone.losses[:2] == first.losses[:2]
    assert alone.losses[2:] != first.losses[2:]


def test_a_batch_that_would_grow_after_the_end_is_a_warning(plain):
    options = {"global_batch_size": "4@0,8@1B", "max_train_steps": 2}
    run = plain.train_well("late", per_device_train_batch_size=2, **options)
    assert "The run ends before --global_batch_size 4@0,8@1B grows to 8 samples." in run.output
    assert "world: 1 rank, cpu" in run.output


@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        (1, {"per_device_train_batch_size": 8}),
        pytest.param(2, {"per_device_train_batch_size": 4}, marks=pytest.mark.layouts),
        pytest.param(4, {"per_device_train_batch_size": 4}, marks=pytest.mark.layouts),
        pytest.param(
            2,
            {"per_device_train_batch_size": 2, "pipeline_parallel_size": 2},
            marks=pytest.mark.extended,
        ),
        pytest.param(
            2,
            {"per_device_train_batch_size": 4, "data_parallel_shard_size": 2},
            marks=pytest.mark.extended,
        ),
    ],
    ids=["1", "2", "4", "pipeline", "shards"],
)
def test_ranks_and_micro_batches_do_not_change_a_growing_batch(plain, alone, ranks, options):
    name = f"{ranks}-" + "-".join(options)
    run = plain.train_well(name, ranks=ranks, **GROWING, **options)

    assert run.losses == pytest.approx(alone.losses, rel=1e-5)
    assert [record["samples"] for record in run.metrics if "samples" in record] == STOPS


@pytest.mark.layouts
def test_kfac_trains_through_the_borders_of_a_growing_batch(plain):
    options = {**GROWING, "kfac": True, "kfac_factor_update_steps": 1, "kfac_inv_update_steps": 2}
    one = plain.train_well("kfac-1", per_device_train_batch_size=8, **options)
    two = plain.train_well("kfac-2", ranks=2, per_device_train_batch_size=2, **options)
    assert two.losses == pytest.approx(one.losses, rel=1e-4)


def test_the_rate_grows_with_the_square_root_of_the_batch_on_request(plain, alone):
    scaled = plain.train_well(
        "scaled", per_device_train_batch_size=2, lr_batch_scaling="sqrt", **GROWING
    )
    rates = [
        [record["learning_rate"] for record in run.metrics if "learning_rate" in record]
        for run in (alone, scaled)
    ]
    assert rates[0] == [1e-3] * 6
    factors = [1, 1, 2**0.5, 2**0.5, 2, 2]
    assert rates[1] == pytest.approx([1e-3 * factor for factor in factors], rel=1e-12)


@pytest.mark.parametrize("ranks", [pytest.param(n, marks=FAULTS * (n != 2)) for n in (1, 2, 4)])
def test_a_kill_on_either_side_of_a_border_resumes_to_the_same_bits(bench, ranks):
    """With dropout; the starts die in the last step of 4 samples, the first of 8, the last of 8."""
    options = {
        **GROWING,
        "per_device_train_batch_size": 4,
        "lr_batch_scaling": "sqrt",
        "checkpointing_steps": 1,
        "async_checkpoint": False,  # else a kill may find the last checkpoint unfinished
        "logging_steps": 3,
        "report_to": "tensorboard",
    }
    straight = bench.train_well(f"straight-{ranks}", ranks=ranks, **options)
    kills = [
        Fault(at=STEP, what="SIGKILL", call=2, rank=0),
        Fault(at=STEP, what="SIGKILL", call=2, rank=0),
        Fault(at="llm.checkpoint.save:commit_checkpoint", what="SIGKILL", call=2, rank=0),
    ]

    run = kill_and_go_on(bench, f"killed-{ranks}", kills, together=True, ranks=ranks, **options)

    assert "at step 3" in run.output
    check_same(run, straight)


def test_a_growing_batch_is_kept_on_resume_and_another_one_refused(bench):
    options = {"max_train_steps": 3, "checkpointing_steps": 3, "resume_from_checkpoint": True}
    bench.train_well("kept", global_batch_size="4@0,8@250", **options)

    # The phases count, whose borders lie at whole steps; the length may grow.
    same = bench.train_well("kept", global_batch_size="4@0,8@256", **options)
    assert "at step 3" in same.output
    longer = bench.train_well("kept", ranks=2, **{**options, "max_train_steps": 4})
    assert longer.metrics[-1]["samples"] == 24
    other = {**options, "max_train_steps": 4, "global_batch_size": "4@0,16@256"}
    with pytest.raises(LLMError, match="global_batch_size was '4@0,8@250' and is '4@0,16@256'"):
        bench.read("kept", **other)


@pytest.mark.parametrize("branches", [True, False])
def test_a_refused_batch_is_shown_as_it_was_written(branches):
    # In steps of 4 samples of 32 tokens, the first of 8 samples begins at token 2,048.
    batch = {"global_batch_size": "4@0,8@2048", "batch_option": "4@0,8@2K"}
    path = Path("runs/a/checkpoints/step_00000002")
    start = Checkpoint(path=path, step=2, saved_time="", world_size=1, metadata=batch, files={})

    def run_with(batch: str) -> SimpleNamespace:
        branch_from = start if branches else None
        config = GPTConfig(global_batch_size=batch)
        return SimpleNamespace(config=config, start=start, branch_from=branch_from, block_size=32)

    assert read_inherited_global_batch(run_with("4@0,8@2K")) == "4@0,8@2048"
    with pytest.raises(CheckpointError) as caught:
        read_inherited_global_batch(run_with("4@0,8@4K"))
    assert "global_batch_size was '4@0,8@2K' and is '4@0,8@4K'." in str(caught.value)
    assert f"A branch of {path}" in str(caught.value) or not branches
