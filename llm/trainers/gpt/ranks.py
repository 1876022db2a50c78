"""Checks the number of ranks against layout, topology and global batch."""

from dataclasses import replace
from typing import Any

from llm.data.batch_plan import plan_batches
from llm.data.options import LENGTHS
from llm.errors import ConfigError
from llm.parallel.dims import parallel_dims
from llm.parallel.gossip.rounds import Round, check_topology, make_rounds
from llm.trainers.gpt.config import CoreConfig


def check_ranks(config: CoreConfig, *, ranks: int, ranks_per_node: int) -> None:
    """Refuse a number of ranks that layout, topology or global batch do not allow.

    Args:
        config: The options.
        ranks: Number of all ranks.
        ranks_per_node: Number of consecutive ranks on each node.

    Raises:
        ConfigError: The ranks cannot be divided this way; the message is the trainer's.
    """
    layout = parallel_dims(config, ranks)
    divide_ranks(config, ranks=ranks, ranks_per_node=ranks_per_node)
    # Without the length, because it needs the model and the data.
    batch: Any = dict.fromkeys(LENGTHS)
    plan_batches(
        replace(config, **batch), num_windows=1, world_size=layout.data_ranks, block_size=1
    )


def divide_ranks(
    config: CoreConfig, *, ranks: int, ranks_per_node: int
) -> tuple[int, int, list[Round]]:
    """Divide the ranks into replicas of the model.

    Args:
        config: The options.
        ranks: Number of all ranks.
        ranks_per_node: Number of consecutive ranks on each node.

    Returns:
        (number of replicas, ranks of each, rounds of gossip).

    Raises:
        ConfigError: The topology does not allow this number; the message names allowed ones.
    """
    if config.eval_only or config.data_parallel == "allreduce":
        return 1, ranks, []
    if config.data_parallel == "diloco":
        return ranks, 1, []
    check_topology("complete", ranks=ranks, ranks_per_node=ranks_per_node)
    number, each, on_node = ranks, 1, ranks_per_node
    if config.gossip_group == "nodes":
        size = config.data_parallel_shard_size
        if size not in (1, ranks_per_node):
            raise ConfigError(
                "--gossip_group nodes divides a replica over all ranks of a node, and there are "
                f"{ranks_per_node} on each, not the {size} of --data_parallel_shard_size."
            )
        number, each, on_node = ranks // ranks_per_node, ranks_per_node, 1
    check_topology(config.topology, ranks=number, ranks_per_node=on_node)
    return number, each, make_rounds(config.topology, ranks=number, ranks_per_node=on_node)
