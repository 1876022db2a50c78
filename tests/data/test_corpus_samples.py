import numpy as np
import pytest

from llm.data.corpus import CorpusSource, Samples, TokenStream
from llm.data.formats.flat import open_token_file
from llm.data.order import WindowSampler
from tests.support.token_files import write_pair


@pytest.fixture
def streams(tmp_path):
    """Three sources of 400, 100 and 40 tokens, whose ids tell them and their places apart."""
    sizes = {0: 400, 1000: 100, 2000: 40}
    return [
        TokenStream(
            open_token_file(write_pair(tmp_path / str(first), [list(range(first, first + n))]))
        )
        for first, n in sizes.items()
    ]


def blend(streams, weights, seed=3):
    parts = [
        CorpusSource(str(number), weight, stream)
        for number, (weight, stream) in enumerate(zip(weights, streams, strict=True))
    ]
    return Samples(parts, block_size=10, seed=seed)


def source_of(tokens):
    return (tokens[:, 0] // 1000).tolist()


def test_a_single_source_has_the_order_of_its_sampler(streams):
    samples = blend(streams[:1], [1.0])
    sampler = WindowSampler(num_tokens=400, block_size=10, seed=3)

    assert samples.num_windows == 40
    for numbers in (np.arange(5000), np.array([10**12, 1023, 1024, 0, 7])):
        assert (samples.read(numbers)[:, 0] == sampler.locate_windows(numbers)).all()


def test_samples_are_windows_of_the_blends_sources(streams):
    samples = blend(streams, [0.5, 0.25, 0.25])

    tokens = samples.read(np.arange(400))

    assert tokens.shape == (400, 11)
    assert tokens.dtype == np.uint16
    sources = np.array(source_of(tokens))
    assert np.bincount(sources).tolist() == [200, 100, 100] == samples.samples_per_source(400)
    places = tokens.astype(int) - 1000 * sources[:, None]
    sizes = np.array([400, 100, 40])[sources]
    assert (places == (places[:, :1] + np.arange(11)) % sizes[:, None]).all()


def test_an_epoch_has_as_many_samples_as_all_sources_together(streams):
    assert blend(streams, [0.5, 0.25, 0.25]).num_windows == 40 + 10 + 4
    assert blend(streams, [0.5, 0.5, 0.0]).num_windows == 40 + 10


def test_a_source_of_weight_0_is_never_read_and_may_be_too_short(streams):
    samples = Samples(
        [CorpusSource("a", 0.0, streams[2]), CorpusSource("b", 1.0, streams[1])],
        block_size=50,
        seed=3,
    )

    assert set(source_of(samples.read(np.arange(50)))) == {1}
    assert samples.epoch_samples(0) == 0


def test_two_equal_sources_are_read_in_different_orders(streams):
    tokens = blend([streams[0], streams[0]], [0.5, 0.5]).read(np.arange(80))

    assert sorted(tokens[0::2, 0].tolist()) == sorted(tokens[1::2, 0].tolist())
    assert tokens[0::2, 0].tolist() != tokens[1::2, 0].tolist()
