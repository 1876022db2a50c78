"""The token files of a planned run, for its length and its limits in epochs."""

from llm.config.duration import Duration
from llm.data.corpus import Corpus, Samples
from llm.data.epoch_limits import count_epochs, describe_repeated_data, refuse_excess_epochs
from llm.data.open_corpus import open_planned_corpus
from llm.data.skipped_samples import NO_SKIPPED_SAMPLES, parse_skipped_ranges
from llm.errors import DataError
from llm.trainers.gpt.config import CoreConfig


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

    def __init__(self, options: CoreConfig, corpus: Corpus, *, block_size: int) -> None:
        self._options = options
        self._sources = corpus.train
        self._skipped = NO_SKIPPED_SAMPLES.skip(parse_skipped_ranges(options.skip_samples))
        self._samples = Samples(corpus.train, stages=corpus.stages, block_size=block_size, seed=0)
        self.num_windows = self._samples.num_windows

    def count_epochs(self, num_samples: int) -> dict[str, float]:
        """Return the epochs of each source that a run of a number of samples takes, by name."""
        epochs = count_epochs(self._samples, self._count_samples(num_samples))
        return {
            source.name: float(number) for source, number in zip(self._sources, epochs, strict=True)
        }

    def refuse_excess_epochs(self, num_samples: int) -> None:
        """Refuse a run of a number of samples as the trainer does.

        Raises:
            ConfigError: A source is used up before the end, or `max_epochs` names an unknown one.
        """
        _, num_used_samples = self._skipped.sample_range((0, num_samples))
        refuse_excess_epochs(
            self._options, self._sources, self._samples, num_samples=num_used_samples
        )

    def describe_repetition(self, num_samples: int, *, max_duration: Duration) -> str | None:
        """Return the trainer's warning about a run that repeats its data; None without one.

        Args:
            num_samples: Samples of the run.
            max_duration: Its length as the user states it.
        """
        return describe_repeated_data(
            self._options,
            self._sources,
            self._samples,
            self._count_samples(num_samples),
            max_duration=max_duration,
        )

    def _count_samples(self, num_samples: int) -> list[int]:
        """Return how many samples of a run come from each source."""
        return self._skipped.samples_per_source(self._samples.samples_per_source, num_samples)


def open_planned_data(options: CoreConfig, *, block_size: int) -> PlannedData | None:
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
