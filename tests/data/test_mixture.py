"""Stages of a mixture: shares, borders, and sources that go on, for any weights and borders."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llm.data.corpus import CorpusSource, Samples, TokenStream
from llm.data.formats.flat import open_token_file
from llm.data.order import Blend, Mixture, MixtureStage, WindowSampler, find_stage_starts
from llm.errors import ConfigError, DataError
from tests.support.token_files import write_pair

RUN = 400
"""Samples of the runs below, which may end before their last stage begins."""


@st.composite
def staged(draw):
    """Stages of one token a sample: up to four of them, with up to five sources."""
    num_sources = draw(st.integers(1, 5))
    ends = sorted(draw(st.sets(st.integers(1, 300), max_size=3)))
    weight = st.one_of(st.just(0.0), st.floats(1e-3, 1.0))
    blend = st.lists(weight, min_size=num_sources, max_size=num_sources).filter(any)
    return [MixtureStage(end, tuple(draw(blend))) for end in [*ends, None]]


def mixture_of(stages, block_size=1):
    return Mixture(stages, block_size=block_size)


@settings(max_examples=40, deadline=None)
@given(staged())
def test_each_source_is_within_k_samples_of_its_share_in_every_stage(stages):
    sources, _ = mixture_of(stages).locate(np.arange(RUN))

    starts = [*find_stage_starts(stages, block_size=1), RUN]
    for stage, start, stop in zip(stages, starts, starts[1:], strict=False):
        used = [number for number, weight in enumerate(stage.weights) if weight]
        total = sum(map(Fraction, stage.weights))
        shares = np.array([float(Fraction(stage.weights[number]) / total) for number in used])
        served = np.cumsum(sources[start:stop, None] == np.array(used), axis=0)
        wanted = np.arange(1, stop - start + 1)[:, None] * shares
        assert np.abs(served - wanted).max(initial=0) < max(len(used), 1)
        assert set(sources[start:stop].tolist()) <= set(used)


@settings(max_examples=40, deadline=None)
@given(staged())
def test_a_source_continues_across_stages_without_a_gap_or_a_repeat(stages):
    mixture = mixture_of(stages)

    sources, numbers = mixture.locate(np.arange(RUN))

    for source, served in enumerate(mixture.samples_per_source(RUN)):
        assert numbers[sources == source].tolist() == list(range(served))


@settings(max_examples=20, deadline=None)
@given(staged(), st.lists(st.integers(0, RUN - 1), max_size=20))
def test_any_samples_are_located_without_those_before_them(stages, samples):
    whole = np.stack(mixture_of(stages).locate(np.arange(RUN)))

    found = np.stack(mixture_of(stages).locate(np.array(samples, dtype=np.int64)))

    assert (found == whole[:, samples]).all()
    counts = [np.bincount(whole[0][:n], minlength=len(stages[0].weights)) for n in samples]
    assert [mixture_of(stages).samples_per_source(n) for n in samples] == [
        c.tolist() for c in counts
    ]


def test_one_stage_is_a_blend():
    samples = np.array([0, 7, 10**6, 10**9])
    one = mixture_of([MixtureStage(None, (0.7, 0.3))]).locate(samples)
    assert np.stack(one).tolist() == np.stack(Blend([0.7, 0.3]).locate(samples)).tolist()


def test_a_stage_has_the_samples_that_fit_whole_into_its_tokens():
    stages = [
        MixtureStage(95, (1.0, 0.0)),
        MixtureStage(100, (0.0, 1.0)),
        MixtureStage(None, (1.0, 1.0)),
    ]
    assert find_stage_starts(stages, block_size=10) == [0, 9, 10]

    sources, numbers = mixture_of(stages, block_size=10).locate(np.arange(14))

    assert sources.tolist() == [0] * 9 + [1] + [0, 1, 0, 1]
    assert numbers.tolist() == [*range(9), 0, 9, 1, 10, 2]


def test_borders_lie_exactly_a_trillion_tokens_into_a_run():
    end = 10**12
    stages = [MixtureStage(end * 4096, (0.5, 0.5)), MixtureStage(None, (0.0, 1.0))]
    mixture = mixture_of(stages, block_size=4096)

    sources, numbers = mixture.locate(end + np.arange(-2, 2))

    assert sources.tolist() == [0, 1, 1, 1]
    assert numbers.tolist() == [end // 2 - 1, end // 2 - 1, end // 2, end // 2 + 1]


@pytest.mark.parametrize(
    ("ends", "said"),
    [
        ([9], "data_stage 1 ends at 9 tokens, before its first sample of --block_size 10 tokens"),
        ([30, 35], "data_stage 2 ends at 35 tokens, before its first sample"),
    ],
)
def test_a_stage_without_a_sample_is_refused(ends, said):
    with pytest.raises(ConfigError, match=said):
        mixture_of([MixtureStage(end, (1.0,)) for end in [*ends, None]], block_size=10)


def test_a_look_up_computes_one_block_of_the_blend_and_of_a_source(tmp_path, monkeypatch):
    """However far it is into the run: nothing before it is computed."""
    computed = []

    def counted(make):
        def make_block(self, block):
            values = make(self, block)
            computed.append(values.shape[1])
            return values

        return make_block

    for kind in (Blend, WindowSampler):
        monkeypatch.setattr(kind, "_compute_block", counted(kind._compute_block))
    samples = staged_samples(
        tmp_path, [MixtureStage(10**9, (0.5, 0.5)), MixtureStage(None, (0.1, 0.9))]
    )

    samples.locate(np.array([10**9]))

    assert len(computed) == 2
    assert sum(computed) <= 2**12 + 2**10


def staged_samples(folder, stages):
    """Samples of ten tokens from sources of 400 and 100 tokens, whose ids tell their places."""
    sources = []
    for name, first, size in (("a", 0, 400), ("b", 1000, 100)):
        prefix = write_pair(folder / name, [list(range(first, first + size))])
        weight = sum(stage.weights[len(sources)] for stage in stages) / len(stages)
        sources.append(CorpusSource(name, weight, TokenStream(open_token_file(prefix))))
    return Samples(sources, stages=stages, block_size=10, seed=3)


def test_no_token_repeats_across_stages_before_its_source_is_used_up(tmp_path):
    stages = [
        MixtureStage(200, (0.8, 0.2)),
        MixtureStage(300, (0.0, 1.0)),
        MixtureStage(None, (1.0, 0.0)),
    ]
    samples = staged_samples(tmp_path, stages)
    # 16 + 24 samples of the 40 windows of a; 4 + 10 of the 10 of b.
    tokens = samples.read(np.arange(20 + 10 + 24)).astype(int)

    starts = tokens[:, 0]
    assert sorted(starts[starts < 1000].tolist()) == list(range(0, 400, 10))
    first_epoch = starts[starts >= 1000][:10]
    assert sorted(first_epoch.tolist()) == list(range(1000, 1100, 10))
    assert samples.samples_per_source(54) == [40, 14]
    assert samples.num_windows == 50


def test_where_samples_come_from_is_where_their_tokens_lie(tmp_path):
    samples = staged_samples(
        tmp_path, [MixtureStage(200, (0.8, 0.2)), MixtureStage(None, (0.3, 0.7))]
    )
    numbers = np.arange(60)

    sources, starts = samples.locate(numbers)

    assert (samples.read(numbers)[:, 0] == 1000 * sources + starts).all()


def test_a_source_of_a_later_stage_that_is_too_short_is_named(tmp_path):
    prefixes = [write_pair(tmp_path / name, [[1] * size]) for name, size in (("a", 40), ("b", 5))]
    sources = [CorpusSource(p.name, 0.5, TokenStream(open_token_file(p))) for p in prefixes]
    stages = [MixtureStage(100, (1.0, 0.0)), MixtureStage(None, (0.0, 1.0))]
    with pytest.raises(DataError, match="The source b has 5 tokens, too few for one window"):
        Samples(sources, stages=stages, block_size=10, seed=1)
