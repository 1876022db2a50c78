"""Epochs of the data sources: the limits of `--max_epochs`, and a warning without them."""

import math
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path

from llm.config.duration import Duration
from llm.data.corpus import CorpusSource, Samples
from llm.data.formats.flat import locate_token_file
from llm.data.options import DataOptions
from llm.errors import ConfigError

_MAX_USEFUL_EPOCHS = 4
"""Epochs of a source that are almost worth as much as new text (Muennighoff et al. 2023, "Scaling
Data-Constrained Language Models")."""


def count_epochs(samples: Samples, num_samples_by_source: Sequence[int]) -> list[Fraction]:
    """Return the epochs that a run takes of each source."""
    return [
        Fraction(num_samples, samples.epoch_samples(source_index)) if num_samples else Fraction(0)
        for source_index, num_samples in enumerate(num_samples_by_source)
    ]


def describe_repeated_data(
    options: DataOptions,
    sources: Sequence[CorpusSource],
    samples: Samples,
    num_samples_by_source: Sequence[int],
    *,
    max_duration: Duration,
) -> str | None:
    """Return a warning about the source that a run repeats most; None if it repeats none often.

    Args:
        options: Contains `max_epochs`, which allows repetitions.
        sources: The sources of the training split.
        samples: Their samples.
        num_samples_by_source: Samples that the run takes of each source.
        max_duration: Length of the run, which allows them if it is in epochs.
    """
    if options.max_epochs or max_duration.unit == "epochs":
        return None
    epochs_by_source = count_epochs(samples, num_samples_by_source)
    most_epochs = max(epochs_by_source)
    if most_epochs <= _MAX_USEFUL_EPOCHS:
        return None
    source = sources[epochs_by_source.index(most_epochs)]
    source_label = "its data" if len(sources) == 1 else f"the source {source.name}"
    num_useful_samples = int(sum(num_samples_by_source) * _MAX_USEFUL_EPOCHS / most_epochs)
    return (
        f"The run takes {float(most_epochs):,.1f} epochs of {source_label}, and text that "
        f"is repeated more than {_MAX_USEFUL_EPOCHS} times teaches little: set --max_duration to "
        f"'{num_useful_samples * samples.block_size} tokens' at most, or allow the epochs with "
        f"--max_epochs {math.ceil(most_epochs)}."
    )


def refuse_excess_epochs(
    options: DataOptions, sources: Sequence[CorpusSource], samples: Samples, *, num_samples: int
) -> None:
    """Refuse a run if a source would serve too many epochs.

    The samples of a run are known before it begins, so the check is exact, and no weight changes
    when a source is used up.

    Args:
        options: Contains `max_epochs`.
        sources: The sources of the training split.
        samples: Their samples.
        num_samples: Samples of the whole run.

    Raises:
        ConfigError: A source is used up before the end, or the option names an unknown source.
    """
    num_samples_by_source = samples.samples_per_source(num_samples)
    problems = []
    for source_index, max_epochs in _parse_max_epochs(options.max_epochs, sources).items():
        epoch_samples = samples.epoch_samples(source_index)
        source_samples = num_samples_by_source[source_index]
        if source_samples > max_epochs * epoch_samples:
            problems.append(
                f"--max_epochs is {max_epochs:g} for the source {sources[source_index].name}, "
                f"which has {epoch_samples:,} samples, and the run would take {source_samples:,} "
                f"({source_samples / epoch_samples:.4g} epochs); give it less weight or more text, "
                "shorten the run, or allow more epochs."
            )
    if problems:
        raise ConfigError(" ".join(problems))


def _parse_max_epochs(
    values: Sequence[float | str], sources: Sequence[CorpusSource]
) -> dict[int, float]:
    """Return the maximum epochs by the index of the source, for sources with a limit."""
    if len(values) == 1 and not isinstance(values[0], str):
        return dict.fromkeys(range(len(sources)), values[0])
    prefixes = [source.stream.file.prefix.resolve() for source in sources]
    max_epochs_by_source: dict[int, float] = {}
    for max_epochs, path in _pair_limits_with_paths(values):
        limited_prefix = locate_token_file(Path(path))[0].resolve()
        if limited_prefix not in prefixes:
            raise ConfigError(
                f"--max_epochs names {path}, which is not a source of the training data; they are "
                f"{', '.join(str(source.stream.file.prefix) for source in sources)}."
            )
        max_epochs_by_source |= {
            source_index: max_epochs
            for source_index, prefix in enumerate(prefixes)
            if prefix == limited_prefix
        }
    return max_epochs_by_source


def _pair_limits_with_paths(values: Sequence[float | str]) -> list[tuple[float, str]]:
    """Return each number in `max_epochs` with the path after it.

    Raises:
        ConfigError: Numbers and paths do not alternate.
    """
    limit_pairs = [
        (max_epochs, path)
        for max_epochs, path in zip(values[::2], values[1::2], strict=False)
        if not isinstance(max_epochs, str) and isinstance(path, str)
    ]
    if 2 * len(limit_pairs) != len(values):
        raise ConfigError(
            f"--max_epochs {' '.join(map(str, values))} is neither one number for every source nor "
            "a number before each path, such as 4 data/web 1 data/code; give one of the two."
        )
    return limit_pairs
