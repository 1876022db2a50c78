import math

import numpy as np
import pytest

from llm.extensions.spikes.spike_detection import WINDOW, Spike, append_loss, find_spike


def normal_losses(number, *, seed=1):
    return (3.0 + 0.1 * np.random.default_rng(seed).standard_normal(number)).tolist()


def test_the_score_is_the_distance_in_median_absolute_deviations():
    before = [2.0] * 11 + [2.9, 3.0, 3.1] * 7 + [4.0] * 11  # median 3, half within 0.5

    assert find_spike(3.0 + 10 * 1.4826, before) == Spike(
        median=3.0, score=pytest.approx(10 * 1.4826 / (1.4826 * 1.0))
    )


def test_a_loss_far_above_those_before_is_a_spike():
    before = normal_losses(100)
    assert find_spike(3.4, before) is None
    spike = find_spike(4.5, before)
    assert spike is not None
    assert spike.median == pytest.approx(3.0, abs=0.05)
    assert 10 < spike.score < 25


def test_a_low_loss_is_not_a_spike():
    assert find_spike(0.1, normal_losses(100)) is None


def test_nothing_is_a_spike_before_there_is_a_past():
    assert find_spike(100.0, normal_losses(31)) is None
    assert find_spike(100.0, normal_losses(32)) is not None


def test_an_earlier_spike_hides_no_later_one():
    before = [*normal_losses(60), 50.0, 80.0, *normal_losses(30)]
    assert find_spike(4.5, before) is not None


def test_losses_that_do_not_vary_make_no_spike_of_a_small_rise():
    assert find_spike(2.05, [2.0] * 64) is None
    assert find_spike(2.07, [2.0] * 64) is not None


def test_an_infinite_loss_is_a_spike_and_is_not_remembered():
    before = normal_losses(50)
    assert find_spike(math.inf, before) is not None
    assert append_loss(math.inf, before) == append_loss(math.nan, before) == before


def test_only_the_window_is_remembered():
    before: list[float] = []
    for loss in range(WINDOW + 5):
        before = append_loss(float(loss), before)
    assert before == [float(loss) for loss in range(5, WINDOW + 5)]


def test_a_falling_loss_with_noise_raises_no_alarm():
    draw = np.random.default_rng(3)
    before: list[float] = []
    for step in range(5000):
        loss = 2.0 + 6.0 * math.exp(-step / 300) + 0.1 * float(draw.standard_normal())
        assert find_spike(loss, before) is None, step
        before = append_loss(loss, before)
