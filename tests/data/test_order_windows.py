import numpy as np
import pytest

from llm.data.order import WindowSampler, permute
from llm.errors import DataError


@pytest.mark.parametrize("size", [1, 2, 3, 7, 10, 1000, 65537])
def test_permute_is_a_bijection(size):
    for key in range(5):
        assert sorted(permute(np.arange(size), size=size, key=key)) == list(range(size))


@pytest.mark.parametrize("size", [2, 7, 1000])
def test_permute_sends_each_position_to_any_other_equally_often(size):
    num_keys = 20_000 if size < 1000 else 40_000
    keys = np.arange(num_keys, dtype=np.uint64)
    for position in (0, size // 2, size - 1):
        values = permute(np.full(num_keys, position), size=size, key=keys)
        counts = np.bincount(values, minlength=size)
        chi_square = ((counts - num_keys / size) ** 2 / (num_keys / size)).sum()
        # Five standard deviations of a chi-square with size - 1 degrees of freedom.
        assert chi_square < (size - 1) + 5 * np.sqrt(2 * (size - 1))


def test_permute_of_five_reaches_all_orders_equally_often():
    keys = np.arange(120_000, dtype=np.uint64)
    orders = sum(
        permute(np.full(keys.size, position), size=5, key=keys) * 5**position
        for position in range(5)
    )

    _, counts = np.unique(orders, return_counts=True)

    assert counts.size == 120
    chi_square = ((counts - 1000) ** 2 / 1000).sum()
    assert chi_square < 119 + 5 * np.sqrt(2 * 119)


def test_the_memory_of_permute_does_not_depend_on_the_size():
    values = permute(np.arange(1000), size=10**12, key=5)

    assert len(set(values.tolist())) == 1000
    assert values.min() >= 0
    assert values.max() < 10**12
    assert abs(values.mean() / 10**12 - 0.5) < 0.05


def test_the_order_is_the_same_on_every_machine_and_in_every_version():
    sampler = WindowSampler(num_tokens=100, block_size=20, seed=0)

    assert permute(np.arange(7), size=7, key=1).tolist() == [3, 2, 5, 4, 1, 6, 0]
    assert sampler.locate_windows(np.arange(10)).tolist() == [
        80,
        20,
        40,
        0,
        60,
        96,
        36,
        56,
        76,
        16,
    ]


@pytest.mark.parametrize("num_windows", [1, 2, 7, 1000])
def test_each_window_occurs_once_in_each_of_three_epochs(num_windows):
    sampler = WindowSampler(num_tokens=num_windows * 8 + 5, block_size=8, seed=1)

    starts = sampler.locate_windows(np.arange(3 * num_windows)).reshape(3, num_windows)

    assert sampler.num_windows == num_windows
    assert sorted(starts[0]) == list(range(0, num_windows * 8, 8))
    for epoch in starts:
        covered = (epoch[:, None] + np.arange(8)) % sampler.num_tokens
        assert np.unique(covered).size == num_windows * 8


def test_epochs_differ_in_order_and_after_the_first_in_offset():
    sampler = WindowSampler(num_tokens=1000, block_size=10, seed=1)

    first, second, third = sampler.locate_windows(np.arange(300)).reshape(3, 100)

    assert set(first % 10) == {0}
    assert len({*second % 10}) == len({*third % 10}) == 1
    assert set(second.tolist()) != set(third.tolist())
    assert (np.argsort(first) != np.argsort(second)).any()


def test_seeds_differ_in_order():
    orders = [
        tuple(
            WindowSampler(num_tokens=1000, block_size=10, seed=seed).locate_windows(np.arange(100))
        )
        for seed in (0, 1, 2, -1, 2**64 + 3)
    ]

    assert len(set(orders)) == 5


def test_a_batch_across_epochs_equals_its_samples_one_by_one():
    sampler = WindowSampler(num_tokens=75, block_size=10, seed=1)

    together = sampler.locate_windows(np.arange(30))

    assert together.tolist() == [int(sampler.locate_windows(np.array(g))) for g in range(30)]


def test_a_stream_too_short_for_one_window_is_refused():
    with pytest.raises(DataError, match="has 7 tokens, too few for one window of --block_size 8"):
        WindowSampler(num_tokens=7, block_size=8, seed=0)
