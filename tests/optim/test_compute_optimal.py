"""The rule of `--preset compute_optimal` against the numbers of its sources."""

import pytest

from llm.optim.compute_optimal import (
    optimal_batch_tokens,
    optimal_learning_rate,
    optimal_weight_decay,
    round_batch_size,
    warmup_tokens,
)


@pytest.mark.parametrize(
    ("num_tokens", "batch"),
    # The table in nanochat's dev/LOG.md of 2026-02-05: tokens, and the nearest power of two.
    [(0.44e9, 2**18), (1.32e9, 2**19), (9.6e9, 2**20), (17.6e9, 2**20.5), (65.6e9, 2**21)],
)
def test_batches_for_muon_are_those_of_nanochat(num_tokens: float, batch: float):
    assert 0.7 < optimal_batch_tokens(num_tokens, for_muon=True) / batch < 2**0.5


def test_the_reference_of_nanochat_is_its_batch():
    assert optimal_batch_tokens(12 * 110_100_480, for_muon=True) == pytest.approx(2**19)


def test_ten_times_the_tokens_have_two_and_a_half_times_the_batch():
    for for_muon in (False, True):
        smaller = optimal_batch_tokens(1e9, for_muon=for_muon)
        larger = optimal_batch_tokens(1e10, for_muon=for_muon)
        assert larger / smaller == pytest.approx(2.415, abs=1e-3)  # 10^0.383


def test_batches_for_adamw_are_those_of_power_lines():
    # 0.0306 D^0.383 sequences of 2,048 tokens.
    assert optimal_batch_tokens(2.5e9) / 2048 == pytest.approx(121.7, abs=0.1)


@pytest.mark.parametrize(
    ("num_samples", "rounded"),
    [(0.2, 1), (5.4, 5), (9.1, 10), (121.7, 128), (243.0, 256), (230.0, 224), (362.0, 384)],
)
def test_a_batch_is_rounded_to_what_ranks_divide(num_samples: float, rounded: int):
    assert round_batch_size(num_samples) == rounded


def test_rates_are_those_of_step_law():
    # 1.79 * 214663680^-0.713 * 4e9^0.307, at its batch of 0.58 * 4e9^0.571 = 176,308 tokens.
    rate = optimal_learning_rate(num_parameters=214_663_680, num_tokens=4e9, batch_tokens=200_000)
    assert rate == 0.00182
    smaller = optimal_learning_rate(num_parameters=214_663_680, num_tokens=4e9, batch_tokens=44_077)
    assert smaller == pytest.approx(0.00182 / 2, abs=1e-5)
    tiny = optimal_learning_rate(num_parameters=100_000, num_tokens=4e6, batch_tokens=200_000)
    assert tiny == 0.01


def test_weight_decay_keeps_the_time_scale_of_power_lines():
    options = {"num_parameters": 124_439_808, "num_tokens": 20 * 124_439_808}
    decay = optimal_weight_decay(**options, batch_tokens=2**18, learning_rate=3.04e-3)

    time_scale = 2**18 / (3.04e-3 * decay * 20 * 124_439_808)
    assert time_scale == pytest.approx(1.084 * 20**-0.527, rel=0.01)
    doubled = optimal_weight_decay(**options, batch_tokens=2**19, learning_rate=3.04e-3)
    assert doubled == pytest.approx(2 * decay, rel=0.01)


def test_the_warmup_is_a_tenth_up_to_that_of_gpt3():
    assert warmup_tokens(2.5e9) == 250_000_000
    assert warmup_tokens(300e9) == 375_000_000
