"""The most epochs of a source: exact, and refused before anything is trained."""

import pytest

from llm.data.corpus import CorpusSource, Samples, TokenStream
from llm.data.epoch_limits import refuse_excess_epochs
from llm.data.formats.flat import open_token_file
from llm.data.options import DataOptions
from llm.data.order import MixtureStage
from llm.errors import ConfigError
from tests.support.token_files import write_pair


@pytest.fixture
def sources(tmp_path):
    """Sources of 40 and 10 windows of ten tokens."""
    prefixes = [
        write_pair(tmp_path / name, [[1] * size]) for name, size in (("a", 400), ("b", 100))
    ]
    return [
        CorpusSource(prefix.name, 0.5, TokenStream(open_token_file(prefix))) for prefix in prefixes
    ]


def check(sources, num_samples, *words, stages=()):
    samples = Samples(sources, stages=stages, block_size=10, seed=1)
    refuse_excess_epochs(DataOptions(max_epochs=words), sources, samples, num_samples=num_samples)


def prefix(sources, number):
    return str(sources[number].stream.file.prefix)


def test_a_run_may_use_a_source_up_and_no_sample_more(sources):
    check(sources, 20, 1.0)
    check(sources, 30, 1.5)
    with pytest.raises(ConfigError) as refusal:
        check(sources, 22, 1.0)
    assert str(refusal.value).startswith(
        "--max_epochs is 1 for the source b, which has 10 samples, and the run would take 11 "
        "(1.1 epochs); give it less weight or more text"
    )


def test_only_the_sources_that_are_named_have_a_limit(sources):
    check(sources, 80, 1.0, prefix(sources, 0))
    with pytest.raises(ConfigError, match=r"1 for the source a, which has 40 samples, .* take 41 "):
        check(sources, 82, 1.0, f"{prefix(sources, 0)}.bin")
    with pytest.raises(ConfigError, match=r"the source a.* more epochs\. --max_epochs .* source b"):
        check(sources, 82, 1.0, prefix(sources, 0), 4.0, prefix(sources, 1))


def test_epochs_count_over_all_stages(sources):
    stages = [MixtureStage(100, (0.4, 0.6)), MixtureStage(None, (0.6, 0.4))]
    check(sources, 20, 1.0, stages=stages)
    with pytest.raises(ConfigError, match=r"the source b, .* take 12 \(1.2 epochs\)"):
        check(sources, 25, 1.0, stages=stages)


@pytest.mark.parametrize("words", [(1.0, 2.0), ("b",), (1.0, "a", 2.0), ("a", 1.0)])
def test_words_that_are_no_numbers_before_paths_are_refused(sources, words):
    with pytest.raises(
        ConfigError, match="neither one number for every source nor a number before"
    ):
        check(sources, 1, *words)


def test_a_file_that_is_not_a_source_is_refused_with_those_that_are(sources, tmp_path):
    other = write_pair(tmp_path / "other", [[1] * 40])
    with pytest.raises(ConfigError, match=r"names .*/other, which is not a source .*/a, .*/b\.$"):
        check(sources, 1, 1.0, str(other))
