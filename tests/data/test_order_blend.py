from fractions import Fraction

import numpy as np
import pytest

from llm.data.order import Blend


def counts_at_every_prefix(sources, num_sources, before):
    """[num_samples, num_sources]: how often each source was served up to and with a sample."""
    return np.cumsum(sources[:, None] == np.arange(num_sources), axis=0) + np.array(before)


def random_weights(seed):
    draw = np.random.default_rng(seed)
    weights = draw.exponential(size=draw.integers(2, 21)) ** draw.integers(1, 6)
    return [float(weight) for weight in weights]


def test_a_source_of_weight_one_third_gives_every_third_sample():
    sources, indices = Blend([2.0, 1.0]).locate(np.arange(9))

    assert sources.tolist() == [0, 1, 0, 0, 1, 0, 0, 1, 0]
    assert indices.tolist() == [0, 0, 1, 2, 1, 3, 4, 2, 5]


def test_sources_of_equal_weight_alternate_from_the_lower_index():
    sources, indices = Blend([1.0, 1.0, 1.0]).locate(np.arange(7))

    assert sources.tolist() == [0, 1, 2, 0, 1, 2, 0]
    assert indices.tolist() == [0, 0, 0, 1, 1, 1, 2]
    _, alone = Blend([0.3]).locate(np.array([5, 0, 10**12]))
    assert alone.tolist() == [5, 0, 10**12]


@pytest.mark.parametrize("weights", [[5, 3], [11, 3, 2], [0.5, 0.25, 0.125, 0.125], [61, 1, 1, 1]])
def test_samples_come_in_the_order_of_their_ideal_times(weights):
    """Against a sorted list of exact times, in whole 256ths of a sample."""
    times = []
    for source, weight in enumerate(weights):
        share = Fraction(weight) / Fraction(sum(weights))
        times += [(int(256 * (2 * i + 1) / (2 * share)), source, i) for i in range(5000)]
    expected = sorted(times)[:5000]

    sources, indices = Blend(weights).locate(np.arange(5000))

    assert sources.tolist() == [source for _, source, _ in expected]
    assert indices.tolist() == [index for _, _, index in expected]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("first", [0, 10**9 - 500, 10**12 - 500])
def test_every_prefix_has_each_source_within_k_samples_of_its_weight(seed, first):
    weights = random_weights(seed)
    num_sources = len(weights)
    shares = [Fraction(weight) / sum(map(Fraction, weights)) for weight in weights]
    num_samples = 100_000 if first == 0 else 1000
    blend = Blend(weights)

    sources, _ = blend.locate(first + np.arange(num_samples))

    served = counts_at_every_prefix(sources, num_sources, blend.samples_per_source(first))
    # Exact fractions at the start; from there on, floats are exact enough.
    before = zip(blend.samples_per_source(first), shares, strict=True)
    ahead = np.array([float(count - first * share) for count, share in before])
    served = served - np.array(blend.samples_per_source(first)) + ahead
    grown = np.arange(1, num_samples + 1)[:, None] * np.array([float(share) for share in shares])
    assert np.abs(served - grown).max() < num_sources


@pytest.mark.parametrize("first", [0, 65_000, 10**9, 10**12])
def test_each_source_counts_its_samples_without_a_gap(first):
    weights = [0.61, 0.2, 0.1, 0.09]
    blend = Blend(weights)

    sources, indices = blend.locate(first + np.arange(140_000))

    before, after = blend.samples_per_source(first), blend.samples_per_source(first + 140_000)
    for source in range(4):
        assert indices[sources == source].tolist() == list(range(before[source], after[source]))
    assert sum(after) == first + 140_000


def test_any_position_is_computed_without_those_before_it():
    samples = np.random.default_rng(0).integers(0, 10**7, 50)
    weights = [0.4, 0.35, 0.25]

    sources, indices = Blend(weights).locate(samples)

    for sample, source, index in zip(samples, sources, indices, strict=True):
        one_source, one_index = Blend(weights).locate(np.array([sample]))
        assert (one_source[0], one_index[0]) == (source, index)


def test_a_source_of_weight_0_gives_no_sample():
    blend = Blend([0.0, 1.0, 0.0, 3.0])

    sources, _ = blend.locate(np.arange(100_000))

    assert np.bincount(sources, minlength=4).tolist() == [0, 25_000, 0, 75_000]
    assert blend.samples_per_source(10**12) == [0, 25 * 10**10, 0, 75 * 10**10]


def test_a_source_of_tiny_weight_gives_a_sample_eventually():
    blend = Blend([1.0, 1e-30])

    assert blend.samples_per_source(10**6) == [10**6, 0]
    assert blend.samples_per_source(2**40) == [2**40 - 1, 1]
