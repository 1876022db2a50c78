"""The values that decide the training of a member, and the values of the run in its folder."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from llm.checkpoint.run_folder import RunFolder, describe_changes
from llm.data.batch_schedule import plan_batch_phases
from llm.data.skipped_samples import NO_SKIPPED_SAMPLES, parse_skipped_ranges
from llm.errors import ConfigError
from llm.parallel.dims import make_parallel_dims
from llm.tools.report.run_files import read_events
from llm.tools.sweep.member_state import read_stopped_outcome
from llm.trainers.gpt.extensions import GPTConfig
from llm.trainers.gpt.recorded_config import read_config
from llm.trainers.gpt.recorded_options import (
    list_changeable_options,
    list_fixed_options,
    recorded_values,
)

_FREE_BUT_TRAINED_WITH = ("max_epochs", "on_loss_spike")
"""Options that a resumed run may change, and that change what is trained or refused."""


def training_values(
    config: GPTConfig, *, num_ranks: int | None, defaults: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the options that decide what a run trains, as JSON values, and its global batch.

    Args:
        config: The options.
        num_ranks: Number of ranks; without it, an unknown global batch is left out.
        defaults: Values of another run, which give seed and precision if `config` does not.
    """
    values = list_fixed_options(config, defaults=None if defaults is None else dict(defaults))
    free_values = recorded_values(config, "free")
    values |= {name: free_values[name] for name in _FREE_BUT_TRAINED_WITH}
    skipped = NO_SKIPPED_SAMPLES.skip(parse_skipped_ranges(config.skip_samples))
    values["skip_samples"] = str(skipped) or None
    global_batch_size = _global_batch(config, num_ranks)
    if global_batch_size is not None:
        values["global_batch_size"] = global_batch_size
    return values


def _global_batch(config: GPTConfig, num_ranks: int | None) -> int | str | None:
    """Return the samples of a step; None if they depend on the device, other ranks, or a parent."""
    if config.global_batch_size is not None:
        return config.global_batch_size
    micro_batch_size = config.per_device_train_batch_size
    # A branch has the batch of its parent.
    if num_ranks is None or isinstance(micro_batch_size, str) or config.branch_from is not None:
        return None
    try:
        data_ranks = make_parallel_dims(config, num_ranks).data_ranks
    except ConfigError:  # the layout is that of a later start on other ranks
        return None
    return micro_batch_size * data_ranks * config.gradient_accumulation_steps


class RecordedBatch(NamedTuple):
    """The batch of a run, as its folder records it.

    Attributes:
        num_ranks: Number of ranks of the first start; later starts keep its batch. None if unknown.
        global_batch_size: Samples of a step at the last start; None if unknown.
        block_size: Tokens of a sample; None if unknown.
    """

    num_ranks: int | None
    global_batch_size: int | str | None
    block_size: int | None


def _read_batch(folder: Path) -> RecordedBatch:
    """Return the batch of the run in a folder."""
    starts = [event for event in read_events(RunFolder(folder).events) if event["event"] == "start"]
    first, last = (starts[0], starts[-1]) if starts else ({}, {})
    return RecordedBatch(first.get("ranks"), last.get("global_batch_size"), last.get("block_size"))


def check_same_run(config: GPTConfig, *, num_ranks: int | None) -> list[str]:
    """Refuse a member if its folder holds a run that trains or has trained something else.

    A run that is resumed may change its global batch and the options of `change_on_resume`; a
    finished one would count as a run with them.

    Args:
        config: The options of the member, with its folder.
        num_ranks: Number of ranks; None for the ranks of the run.

    Returns:
        Clauses for the options that a finished run had otherwise, and that change its rounding or
        its evaluation.

    Raises:
        ConfigError: Names the options.
    """
    folder = Path(str(config.output_dir))
    if not (folder / "config.toml").exists():
        return []
    recorded_config = read_config(folder)
    is_finished = read_stopped_outcome(folder).state == "finished"
    if is_finished:
        recorded, values = _compare_training(
            config, recorded_config, _read_batch(folder), num_ranks=num_ranks
        )
    else:
        allowed_names = list_changeable_options(config)
        recorded = list_fixed_options(recorded_config)
        values = {
            name: value
            for name, value in list_fixed_options(config, defaults=recorded).items()
            if name not in allowed_names
        }
    if changes := describe_changes(recorded, values):
        raise ConfigError(
            f"{folder} holds a {'finished ' if is_finished else ''}run with other options: "
            f"{'; '.join(changes)}. Give the sweep another --output_dir, or remove this folder."
        )
    return _logged_changes(config, recorded_config) if is_finished else []


def _compare_training(
    config: GPTConfig,
    recorded_config: GPTConfig,
    recorded_batch: RecordedBatch,
    *,
    num_ranks: int | None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what a finished run has trained and what its member would train, as options.

    Where both mean the same, the member has the value of the run.
    """
    recorded = training_values(recorded_config, num_ranks=recorded_batch.num_ranks)
    values = training_values(
        config, num_ranks=num_ranks or recorded_batch.num_ranks, defaults=recorded
    )
    if recorded_batch.global_batch_size is not None:
        recorded["global_batch_size"] = recorded_batch.global_batch_size
    if _has_phases_of(recorded_batch, values.get("global_batch_size")):
        values["global_batch_size"] = recorded_batch.global_batch_size
    if _has_skipped(recorded_config, recorded["skip_samples"], config.skip_samples):
        values["skip_samples"] = recorded["skip_samples"]
    return recorded, values


def _has_phases_of(recorded_batch: RecordedBatch, global_batch_size: int | str | None) -> bool:
    """Return whether a global batch has the same phases as the one of a run.

    In the record of 256@0,512@2B, the second phase begins at a whole step.
    """
    _, recorded_size, block_size = recorded_batch
    if recorded_size is None or block_size is None or global_batch_size is None:
        return False
    phases = plan_batch_phases(global_batch_size, block_size=block_size)
    return phases == plan_batch_phases(recorded_size, block_size=block_size)


def _has_skipped(
    recorded_config: GPTConfig, recorded_ranges: str | None, ranges: str | None
) -> bool:
    """Return whether a finished run has skipped some ranges, and others after loss spikes."""
    if recorded_config.on_loss_spike != "rewind":
        return False
    skipped = NO_SKIPPED_SAMPLES.skip(parse_skipped_ranges(recorded_ranges))
    return skipped.skip(parse_skipped_ranges(ranges)) == skipped


def _logged_changes(config: GPTConfig, recorded_config: GPTConfig) -> list[str]:
    """Return a clause for each option that a resumed run would log as a change."""
    values = {
        name: value
        for name, value in recorded_values(config, "logged").items()
        if value not in (None, "auto")  # the device decides
    }
    return describe_changes(recorded_values(recorded_config, "logged"), values)
