"""Refuses a run that would repeat a data source more often than `--max_epochs` allows."""

from collections.abc import Sequence
from pathlib import Path

from llm.data.corpus import CorpusSource, Samples
from llm.data.formats.flat import locate_token_file
from llm.data.options import DataOptions
from llm.errors import ConfigError


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
            source_name = sources[source_index].name
            problems.append(
                _describe_excess_epochs(source_name, max_epochs, epoch_samples, source_samples)
            )
    if problems:
        raise ConfigError(" ".join(problems))


def _describe_excess_epochs(
    source_name: str, max_epochs: float, epoch_samples: int, source_samples: int
) -> str:
    """Return the sentence about a source that a run would read too often.

    Args:
        source_name: Name of the source.
        max_epochs: Its limit.
        epoch_samples: Samples of one epoch of the source.
        source_samples: Samples that the run would read from it.
    """
    return (
        f"--max_epochs is {max_epochs:g} for the source {source_name}, which has "
        f"{epoch_samples:,} samples, and the run would take {source_samples:,} "
        f"({source_samples / epoch_samples:.4g} epochs); give it less weight or more text, shorten "
        "the run, or allow more epochs."
    )


def _parse_max_epochs(
    values: Sequence[float | str], sources: Sequence[CorpusSource]
) -> dict[int, float]:
    """Return the maximum epochs by the index of the source, for sources with a limit."""
    if len(values) == 1 and not isinstance(values[0], str):
        return dict.fromkeys(range(len(sources)), values[0])
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
    prefixes = [source.stream.file.prefix.resolve() for source in sources]
    max_epochs_by_source: dict[int, float] = {}
    for max_epochs, path in limit_pairs:
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
