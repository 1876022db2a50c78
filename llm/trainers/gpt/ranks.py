"""Chooses the layout of a run, and checks the number of ranks."""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from llm.data.batch_plan import plan_batches
from llm.data.options import LENGTHS
from llm.parallel.dims import parallel_dims
from llm.trainers.gpt.config import CoreConfig
from llm.trainers.gpt.layouts import Layout, Pipelined, Sharded
from llm.trainers.gpt.seams import extensions_of

if TYPE_CHECKING:
    from llm.checkpoint.format import Checkpoint


def choose_layout(
    config: CoreConfig, *, ranks: int, ranks_per_node: int, start: "Checkpoint | None"
) -> Layout:
    """Return the first layout that the options ask for; extensions come first.

    Args:
        config: The options.
        ranks: Number of all ranks.
        ranks_per_node: Number of consecutive ranks on each node.
        start: The checkpoint that the run resumes, branches from, or evaluates.

    Raises:
        ConfigError: The layout does not allow this number of ranks.
    """
    for extension, options in extensions_of(config):
        layout = extension.layout(options, ranks=ranks, ranks_per_node=ranks_per_node, start=start)
        if layout is not None:
            return layout
    dims = parallel_dims(config, ranks)
    if dims.pipeline > 1:
        return Pipelined()
    return Layout() if dims.is_replicated else Sharded()


def check_ranks(config: CoreConfig, *, ranks: int, ranks_per_node: int) -> None:
    """Refuse a number of ranks that layout or global batch do not allow.

    Args:
        config: The options.
        ranks: Number of all ranks.
        ranks_per_node: Number of consecutive ranks on each node.

    Raises:
        ConfigError: The ranks cannot be divided this way; the message is the trainer's.
    """
    dims = parallel_dims(config, ranks)
    choose_layout(config, ranks=ranks, ranks_per_node=ranks_per_node, start=None)
    # Without the length, because it needs the model and the data.
    batch: Any = dict.fromkeys(LENGTHS)
    plan_batches(replace(config, **batch), num_windows=1, world_size=dims.data_ranks, block_size=1)
