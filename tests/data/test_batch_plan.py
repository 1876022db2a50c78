import numpy as np
import pytest

from llm.data.batch_plan import micro_batch_sizes, plan_batches
from llm.data.options import BatchOptions
from llm.errors import ConfigError


def plan(*, num_windows=10, world_size=1, per_device_train_batch_size=2, **options):
    return plan_batches(
        BatchOptions(per_device_train_batch_size=per_device_train_batch_size, **options),
        num_windows=num_windows,
        world_size=world_size,
    )


@pytest.mark.parametrize(
    ("changes", "batch", "steps", "samples"),
    [
        # Epochs: ceil(epochs * windows / batch) steps; batches run across epoch ends.
        ({}, 2, 15, 30),
        ({"num_train_epochs": 1}, 2, 5, 10),
        ({"per_device_train_batch_size": 3}, 3, 10, 30),
        ({"per_device_train_batch_size": 4}, 4, 8, 30),
        ({"per_device_train_batch_size": 4, "num_train_epochs": 1}, 4, 3, 10),
        ({"per_device_train_batch_size": 64}, 64, 1, 30),
        ({"num_windows": 1, "num_train_epochs": 1}, 2, 1, 1),
        # Accumulation and ranks multiply the batch.
        ({"gradient_accumulation_steps": 4}, 8, 4, 30),
        ({"world_size": 4}, 8, 4, 30),
        ({"world_size": 2, "gradient_accumulation_steps": 2}, 8, 4, 30),
        # Steps or samples come before epochs; steps are never ragged, samples may be.
        ({"max_train_steps": 7}, 2, 7, 14),
        ({"max_train_steps": 100, "world_size": 2}, 4, 100, 400),
        ({"max_train_samples": 9}, 2, 5, 9),
        ({"max_train_samples": 9, "gradient_accumulation_steps": 4}, 8, 2, 9),
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


def test_a_global_batch_that_the_ranks_do_not_divide_is_refused():
    with pytest.raises(ConfigError, match=r"--global_batch_size 10 .* times 2 ranks = 4"):
        plan(global_batch_size=10, world_size=2)


@pytest.mark.parametrize(
    ("batch", "ranks", "sizes"),
    [
        (None, 3, [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024]),
        (24, 2, [1, 2, 3, 4, 6, 12]),
        (7, 2, [1]),  # which `plan_batches` then refuses
    ],
)
def test_auto_chooses_powers_of_two_or_divisors_of_the_global_batch(batch, ranks, sizes):
    options = BatchOptions(global_batch_size=batch, per_device_train_batch_size="auto")
    assert micro_batch_sizes(options, world_size=ranks) == sizes


def test_a_resumed_run_keeps_its_global_batch():
    options = BatchOptions(per_device_train_batch_size=2, gradient_accumulation_steps=2)

    made = plan_batches(options, num_windows=10, world_size=1, global_batch_size=8)

    assert (made.global_batch_size, made.accumulation) == (8, 4)
    with pytest.raises(ConfigError, match="--global_batch_size 5 "):
        plan_batches(options, num_windows=10, world_size=1, global_batch_size=5)


def test_an_epoch_ends_with_the_step_that_reads_its_last_sample():
    made = plan(num_windows=10, per_device_train_batch_size=4, num_train_epochs=2)
    # 20 samples: steps end at 4, 8, 12 (past 10), 16, 20.
    assert [made.ends_epoch(step) for step in range(1, 6)] == [False, False, True, False, True]


def test_a_batch_larger_than_the_data_ends_an_epoch_with_every_step():
    made = plan(num_windows=3, per_device_train_batch_size=8, max_train_steps=2)
    assert made.ends_epoch(1)
    assert made.ends_epoch(2)


@pytest.mark.parametrize(
    ("samples", "batch", "steps", "last"),
    [(1, 1, 1, 1), (8, 4, 2, 4), (9, 4, 3, 1), (3, 4, 1, 3), (21, 6, 4, 3)],
)
def test_steps_take_all_samples_and_the_last_one_may_be_smaller(samples, batch, steps, last):
    made = plan(max_train_samples=samples, per_device_train_batch_size=batch)
    ranges = [made.step_samples(step) for step in range(made.total_steps)]
    assert len(ranges) == steps
    assert [g for first, stop in ranges for g in range(first, stop)] == list(range(samples))
    assert ranges[-1][1] - ranges[-1][0] == last


@pytest.mark.parametrize(
    ("world_size", "micro_batch_size"), [(1, 1), (1, 3), (2, 1), (2, 3), (4, 3)]
)
def test_a_step_has_the_same_samples_for_any_world_size_and_accumulation(
    world_size, micro_batch_size
):
    made = plan(
        max_train_samples=70,
        global_batch_size=24,
        per_device_train_batch_size=micro_batch_size,
        world_size=world_size,
    )
    by_rank = [made.rank_samples(2, rank) for rank in range(world_size)]

    # In the order micro-batch, rank, sample they are the step's samples in their order.
    order = np.stack(by_rank, axis=1).reshape(-1)
    assert order.tolist() == [*range(48, 70), -1, -1]


def test_two_ranks_read_alternating_micro_batches():
    made = plan(world_size=2, gradient_accumulation_steps=2, max_train_samples=8)
    assert made.rank_samples(0, 0).tolist() == [[0, 1], [4, 5]]
    assert made.rank_samples(0, 1).tolist() == [[2, 3], [6, 7]]
