from fractions import Fraction

import numpy as np
import pytest

from llm.config.duration import Duration
from llm.data.batch_plan import BatchPlan, list_micro_batch_sizes, plan_batches
from llm.data.batch_schedule import BatchPhase
from llm.data.options import BatchOptions, find_batch_problems
from llm.errors import ConfigError

BLOCK_SIZE = 4
GROWING = "4@0,8@40,24@100"
"""Borders at samples 10 and 25: three steps of 4 samples, two of 8, then 24 from sample 28 on."""


def plan(*, num_windows=10, world_size=1, per_device_train_batch_size=2, **options):
    return plan_batches(
        BatchOptions(per_device_train_batch_size=per_device_train_batch_size, **options),
        num_windows=num_windows,
        world_size=world_size,
        block_size=BLOCK_SIZE,
        num_parameters=100,
    )


def is_interval_end(made: BatchPlan, num_steps: int, interval: str) -> bool:
    return made.is_interval_end(num_steps, Duration(interval), block_size=BLOCK_SIZE)


@pytest.mark.parametrize(
    ("changes", "batch", "steps", "samples"),
    [
        # Epochs: ceil(epochs * windows / batch) steps; batches run across epoch ends.
        ({}, 2, 15, 30),
        ({"max_duration": Duration("1 epoch")}, 2, 5, 10),
        ({"per_device_train_batch_size": 3}, 3, 10, 30),
        ({"per_device_train_batch_size": 4}, 4, 8, 30),
        ({"per_device_train_batch_size": 4, "max_duration": Duration("1 epoch")}, 4, 3, 10),
        ({"per_device_train_batch_size": 64}, 64, 1, 30),
        ({"num_windows": 1, "max_duration": Duration("1 epoch")}, 2, 1, 1),
        # Accumulation and ranks multiply the batch.
        ({"gradient_accumulation_steps": 4}, 8, 4, 30),
        ({"world_size": 4}, 8, 4, 30),
        ({"world_size": 2, "gradient_accumulation_steps": 2}, 8, 4, 30),
        # Steps or samples come before epochs; steps are never ragged, samples may be.
        ({"max_duration": Duration("7 steps")}, 2, 7, 14),
        ({"max_duration": Duration("100 steps"), "world_size": 2}, 4, 100, 400),
        ({"max_duration": Duration("9 samples")}, 2, 5, 9),
        ({"max_duration": Duration("9 samples"), "gradient_accumulation_steps": 4}, 8, 2, 9),
        # A budget in tokens ends with the sample that reaches it: 9 samples have 36 tokens.
        ({"max_duration": Duration("33 tokens")}, 2, 5, 9),
        ({"max_duration": Duration("36 tokens")}, 2, 5, 9),
        ({"max_duration": Duration("0.325 tokens per parameter")}, 2, 5, 9),
        # A global batch decides the accumulation.
        ({"global_batch_size": 8}, 8, 4, 30),
        ({"global_batch_size": 8, "world_size": 2}, 8, 4, 30),
        ({"global_batch_size": 8, "world_size": 4}, 8, 4, 30),
    ],
)
def test_steps_samples_and_batch_size_follow_from_the_options(changes, batch, steps, samples):
    made = plan(**changes)
    assert made.global_batch_size == batch
    assert made.total_steps == steps
    assert made.total_samples == samples


@pytest.mark.parametrize(
    ("batch", "ranks", "sizes"),
    [
        (None, 3, [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024]),
        (24, 2, [1, 2, 3, 4, 6, 12]),
        ("12@0,20@1K", 2, [1, 2, 10]),  # 10 are the 6 of a rank in the first phase
        (7, 2, [1]),  # which `plan_batches` then refuses
    ],
)
def test_auto_chooses_powers_of_two_or_divisors_of_the_global_batch(batch, ranks, sizes):
    options = BatchOptions(global_batch_size=batch, per_device_train_batch_size="auto")
    assert list_micro_batch_sizes(options, world_size=ranks) == sizes


def test_a_resumed_run_keeps_its_global_batch():
    options = BatchOptions(per_device_train_batch_size=2, gradient_accumulation_steps=2)

    sizes = {"num_windows": 10, "world_size": 1, "block_size": BLOCK_SIZE}
    made = plan_batches(options, **sizes, global_batch_size=8)

    assert (made.global_batch_size, made.accumulation) == (8, 4)
    with pytest.raises(ConfigError, match="--global_batch_size 5 "):
        plan_batches(options, **sizes, global_batch_size=5)


def test_an_epoch_ends_with_the_step_that_reads_its_last_sample():
    made = plan(num_windows=10, per_device_train_batch_size=4, max_duration=Duration("2 epochs"))
    # 20 samples: steps end at 4, 8, 12 (past 10), 16, 20.
    assert [step for step in range(1, 6) if is_interval_end(made, step, "1 epoch")] == [3, 5]
    larger = plan(num_windows=3, per_device_train_batch_size=8, max_duration=Duration("2 steps"))
    assert is_interval_end(larger, 1, "1 epoch")
    assert is_interval_end(larger, 2, "1 epoch")


@pytest.mark.parametrize(
    ("samples", "batch", "steps", "last"),
    [(1, 1, 1, 1), (8, 4, 2, 4), (9, 4, 3, 1), (3, 4, 1, 3), (21, 6, 4, 3)],
)
def test_steps_take_all_samples_and_the_last_one_may_be_smaller(samples, batch, steps, last):
    made = plan(max_duration=Duration(f"{samples} samples"), per_device_train_batch_size=batch)
    ranges = [made.step_positions(step) for step in range(made.total_steps)]
    assert len(ranges) == steps
    assert [g for first, stop in ranges for g in range(first, stop)] == list(range(samples))
    assert ranges[-1][1] - ranges[-1][0] == last


def test_two_ranks_read_alternating_micro_batches():
    made = plan(world_size=2, gradient_accumulation_steps=2, max_duration=Duration("8 samples"))
    assert made.rank_positions(0, 0).tolist() == [[0, 1], [4, 5]]
    assert made.rank_positions(0, 1).tolist() == [[2, 3], [6, 7]]


def test_a_phase_ends_with_the_step_that_reaches_its_border():
    made = plan(global_batch_size=GROWING, max_duration=Duration("70 samples"))

    assert made.phases == (BatchPhase(0, 0, 4), BatchPhase(3, 12, 8), BatchPhase(5, 28, 24))
    ranges = [made.step_positions(step) for step in range(made.total_steps)]
    assert ranges == [(0, 4), (4, 8), (8, 12), (12, 20), (20, 28), (28, 52), (52, 70)]
    assert made.format_batch_schedule(BLOCK_SIZE) == "4@0,8@48,24@112"
    # A border between two tokens of a sample, or exactly at the end of a step.
    assert plan(global_batch_size="4@0,8@31").later_phases == (BatchPhase(2, 8, 8),)
    assert plan(global_batch_size="4@0,8@32").later_phases == (BatchPhase(2, 8, 8),)
    assert plan(global_batch_size="4@0,8@33").later_phases == (BatchPhase(3, 12, 8),)


def test_a_phase_that_would_have_no_step_is_left_out():
    made = plan(global_batch_size="8@0,16@1,24@2")
    assert made.phases == (BatchPhase(0, 0, 8), BatchPhase(1, 8, 24))


def test_a_recorded_schedule_has_the_same_phases_when_it_is_read_again():
    recorded = plan(global_batch_size=GROWING).format_batch_schedule(BLOCK_SIZE)
    assert plan(global_batch_size=recorded).phases == plan(global_batch_size=GROWING).phases
    assert plan(global_batch_size=8).format_batch_schedule(BLOCK_SIZE) == 8
    assert plan(global_batch_size="8@0").format_batch_schedule(BLOCK_SIZE) == 8


@pytest.mark.parametrize(
    ("length", "steps", "samples"),
    [
        ({"max_duration": Duration("2 steps")}, 2, 8),
        ({"max_duration": Duration("5 steps")}, 5, 28),
        ({"max_duration": Duration("7 steps")}, 7, 76),
        ({"max_duration": Duration("3 samples")}, 1, 3),
        ({"max_duration": Duration("28 samples")}, 5, 28),
        ({"max_duration": Duration("29 samples")}, 6, 29),
        ({"max_duration": Duration("109 tokens")}, 5, 28),
        ({"max_duration": Duration("6 epochs")}, 7, 60),
    ],
)
def test_a_growing_batch_is_counted_in_steps_and_samples(length, steps, samples):
    made = plan(global_batch_size=GROWING, **length)
    assert (made.total_steps, made.total_samples) == (steps, samples)


def test_numbers_of_samples_are_converted_to_steps_phase_by_phase():
    made = plan(global_batch_size=GROWING, max_duration=Duration("70 samples"))
    samples = (0, 6, 12, Fraction(41, 2), 28, 40)
    assert [made.count_steps(number) for number in samples] == [0, 1.5, 3, 4.0625, 5, 5.5]
    assert made.count_steps(-2) == -0.5


@pytest.mark.parametrize(
    ("world_size", "micro_batch_size", "shapes"),
    [
        # Fewer micro-batches first; smaller ones where a rank has fewer samples than one of them.
        (1, 2, [(2, 2), (4, 2), (12, 2)]),
        (1, 8, [(1, 4), (1, 8), (3, 8)]),
        (2, 4, [(1, 2), (1, 4), (3, 4)]),
        (4, 2, [(1, 1), (1, 2), (3, 2)]),
        (4, 6, [(1, 1), (1, 2), (1, 6)]),
    ],
)
def test_accumulation_gives_way_first_and_then_the_micro_batch(
    world_size, micro_batch_size, shapes
):
    made = plan(
        global_batch_size=GROWING,
        max_duration=Duration("70 samples"),
        per_device_train_batch_size=micro_batch_size,
        world_size=world_size,
    )
    assert [made.micro_batch_shape(step) for step in (2, 3, 5)] == shapes
    for step in range(made.total_steps):
        by_rank = [made.rank_positions(step, rank) for rank in range(world_size)]
        assert by_rank[0].shape == made.micro_batch_shape(step)
        order = np.stack(by_rank, axis=1).reshape(-1)
        first, stop = made.step_positions(step)
        missing = made.phase(step).global_batch_size - (stop - first)
        assert order.tolist() == [*range(first, stop), *[-1] * missing]


def test_a_multiple_of_tokens_is_reached_once_whatever_the_batch():
    made = plan(global_batch_size=GROWING, max_duration=Duration("70 samples"))
    # Steps end at 16, 32, 48, 80, 112, 208 and 280 tokens.
    reached = [is_interval_end(made, step, "40 tokens") for step in range(1, 8)]
    assert reached == [False, False, True, True, False, True, True]


def test_intervals_in_steps_and_epochs_end_with_a_step():
    made = plan(num_windows=10, per_device_train_batch_size=4, max_duration=Duration("4 epochs"))
    ends = {
        interval: [step for step in range(1, 11) if is_interval_end(made, step, interval)]
        for interval in ("3 steps", "2 epochs")
    }
    assert ends == {"3 steps": [3, 6, 9], "2 epochs": [5, 10]}


BUDGET = "is a budget of {} tokens, less than the 32 of one step"


@pytest.mark.parametrize(
    ("world_size", "batch", "options", "sentence"),
    [
        (4, 10, {}, r"--global_batch_size 10 is not a multiple of 8 .*; take 8 or 16\.$"),
        (
            2,
            10,
            {},
            r"10 is not a multiple of 4 \(--per_device_train_batch_size 2 x 2 ranks\); take "
            r"--per_device_train_batch_size 1, which keeps the batch, or 8 or 12\.$",
        ),
        (4, "4@0", {}, "--global_batch_size 4@0 is not a multiple of 8 "),
        (4, "2@0,8@40", {}, r"of 8 .* x 4 ranks\); take one, or a smaller"),
        (4, "6@0,8@40", {}, r"of 8 .* x 4 ranks\); take one, or a smaller"),
        (
            4,
            "8@0,20@40",
            {},
            r"of 8 .* x 4 ranks\); take --per_device_train_batch_size 1, which keeps the batch, or "
            r"one, or a smaller multiple of 4\.$",
        ),
        *(
            (1, 8, {"max_duration": Duration(text)}, f"--max_duration {text} {BUDGET.format(size)}")
            for text, size in (("31 tokens", 31), ("0.1 tokens per parameter", 10))
        ),
    ],
)
def test_a_batch_that_ranks_do_not_divide_or_too_small_a_budget_is_refused(
    world_size, batch, options, sentence
):
    with pytest.raises(ConfigError, match=sentence):
        plan(global_batch_size=batch, world_size=world_size, **options)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("many", "many is neither a number of samples nor a schedule such as 256@0,512@2B"),
        ("256", "neither a number"),
        ("256@0,", "neither a number"),
        ("256@", "neither a number"),
        ("-8@0", "neither a number"),
        ("8@0,16@-5", "neither a number"),
        ("8@1M,16@2M", "does not begin at token 0, or its phases are not in order"),
        ("8@0,16@2M,32@1M", "not in order"),
        ("8@0,16@2M,32@2000K", "not in order"),
        ("0@0,16@2M", "has a phase of 0 samples"),
    ],
)
def test_text_that_is_not_a_batch_schedule_is_refused_in_one_sentence(text, sentence):
    (problem,) = find_batch_problems(BatchOptions(global_batch_size=text))
    assert problem.startswith(f"--global_batch_size {text} ")
    assert sentence in problem
