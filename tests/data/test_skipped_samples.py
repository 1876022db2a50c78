"""From positions, which count what is trained on, to sample indices."""

import numpy as np
import pytest

from llm.data.options import BatchOptions, find_batch_problems
from llm.data.skipped_samples import NO_SKIPPED_SAMPLES, parse_skipped_ranges
from llm.errors import ConfigError


def test_positions_run_past_the_ranges_in_order():
    skipped = NO_SKIPPED_SAMPLES.skip([(3, 5), (7, 8)])

    assert skipped.sample_indices(np.arange(7)).tolist() == [0, 1, 2, 5, 6, 8, 9]
    assert skipped.sample_range((1, 5)) == (1, 7)


def test_every_sample_outside_the_ranges_has_one_position():
    draw = np.random.default_rng(1)
    for _ in range(50):
        starts = draw.integers(0, 300, size=draw.integers(1, 12)).tolist()
        ranges = [(start, start + int(draw.integers(1, 30))) for start in starts]
        left_out = {number for first, stop in ranges for number in range(first, stop)}
        kept = [number for number in range(1000) if number not in left_out][:500]

        numbers = NO_SKIPPED_SAMPLES.skip(ranges).sample_indices(np.arange(500).reshape(5, 100))

        assert numbers.dtype == np.int64
        assert numbers.reshape(-1).tolist() == kept


def test_without_ranges_positions_are_sample_numbers():
    positions = np.array([[0, 10**15]])
    assert NO_SKIPPED_SAMPLES.sample_indices(positions) is positions
    assert str(NO_SKIPPED_SAMPLES) == ""


def test_ranges_that_touch_or_overlap_become_one():
    skipped = NO_SKIPPED_SAMPLES.skip([(20, 30), (5, 10)]).skip([(10, 12), (25, 40)])

    assert skipped.ranges == ((5, 12), (20, 40))
    assert str(skipped) == "5:12,20:40"
    assert NO_SKIPPED_SAMPLES.skip(parse_skipped_ranges(str(skipped))) == skipped
    assert skipped.ranges_below(30) == ((5, 12), (20, 30))
    assert skipped.ranges_below(5) == ()


def test_a_large_range_takes_no_more_time_or_memory_than_a_small_one():
    skipped = NO_SKIPPED_SAMPLES.skip([(10, 10**17)])
    assert skipped.sample_indices(np.array([9, 10])).tolist() == [9, 10**17]


def test_the_samples_served_are_counted_without_those_left_out():
    def count(number: int) -> list[int]:  # even samples come from the first source
        return [(number + 1) // 2, number // 2]

    skipped = NO_SKIPPED_SAMPLES.skip([(2, 3), (4, 5), (100, 200)])

    assert skipped.samples_per_source(count, 4) == [1, 3]  # 0, 1, 3, 5
    assert skipped.samples_per_source(count, 0) == [0, 0]
    assert NO_SKIPPED_SAMPLES.samples_per_source(count, 5) == [3, 2]


@pytest.mark.parametrize(
    "text", ["5", "5:", ":5", "5:5", "6:5", "-1:5", "1:2,", "a:b", "1:2;3:4", "0:1e6", "1:2:3"]
)
def test_text_that_is_not_a_range_is_refused_with_the_wrong_part(text):
    with pytest.raises(ConfigError, match="is not FIRST:STOP, two growing numbers"):
        parse_skipped_ranges(text)
    (problem,) = find_batch_problems(BatchOptions(skip_samples=text))
    assert f"--skip_samples {text}" in problem


def test_several_ranges_are_read_with_spaces_between_them():
    assert parse_skipped_ranges("1:2, 30:40") == [(1, 2), (30, 40)]
    assert parse_skipped_ranges(None) == []
