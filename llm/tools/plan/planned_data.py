"""The token files of a planned run, for its length in epochs."""

from llm.config.duration import Duration
from llm.data.corpus import Corpus, Samples
from llm.data.epoch_limits import count_epochs, describe_repeated_data
from llm.data.open_corpus import open_planned_corpus
from llm.data.skipped_samples import NO_SKIPPED_SAMPLES, parse_skipped_ranges
from llm.errors import DataError
from llm.tools.plan.options import PlanOptions


class PlannedData:
    """The training data of a planned run.

    Attributes:
        num_windows: Samples of one epoch.

    Args:
        options: The run.
        corpus: Its token files; some of them are for training.
        block_size: Tokens of a sample.

    Raises:
        ConfigError: A stage is too short for one sample.
        DataError: A source is too short for one sample.
    """

    def __init__(self, options: PlanOptions, corpus: Corpus, *, block_size: int) -> None:
        self._options = options
        self._sources = corpus.train
        self._samples = Samples(corpus.train, stages=corpus.stages, block_size=block_size, seed=0)
        self.num_windows = self._samples.num_windows

    def count_epochs(self, num_samples: int) -> dict[str, float]:
        """Return the epochs of each source that a run of a number of samples takes, by name."""
        epochs = count_epochs(self._samples, self._count_samples(num_samples))
        return {
            source.name: float(number) for source, number in zip(self._sources, epochs, strict=True)
        }

    def describe_repetition(self, num_samples: int) -> str | None:
        """Return the trainer's warning about a run that repeats its data; None without one."""
        duration = self._options.max_duration
        if self._options.num_tokens is not None:
            duration = Duration(f"{num_samples} samples")
        return describe_repeated_data(
            self._options,
            self._sources,
            self._samples,
            self._count_samples(num_samples),
            max_duration=duration,
        )

    def _count_samples(self, num_samples: int) -> list[int]:
        """Return how many samples of a run come from each source."""
        skipped = NO_SKIPPED_SAMPLES.skip(parse_skipped_ranges(self._options.skip_samples))
        return skipped.samples_per_source(self._samples.samples_per_source, num_samples)


def open_planned_data(options: PlanOptions, *, block_size: int) -> PlannedData | None:
    """Open the token files that the options name; None if they name text.

    A run can be planned on a machine without its data, so files that cannot be opened count as
    unknown.
    """
    try:
        corpus = open_planned_corpus(options)
        if corpus is None or not corpus.train:
            return None
        return PlannedData(options, corpus, block_size=block_size)
    except DataError:
        return None
