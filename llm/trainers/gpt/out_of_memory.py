"""A device that runs out of memory: the error as a sentence with remedies."""

import contextlib
import os
from collections.abc import Iterator

from llm.data.options import device_batch_size
from llm.errors import DeviceMemoryError
from llm.metrics.hardware import GIB, device_memory, is_out_of_memory
from llm.runtime.world import World, device_of, ranks_per_node
from llm.trainers.gpt.config import CoreConfig


@contextlib.contextmanager
def explain_out_of_memory(config: CoreConfig, world: World) -> Iterator[None]:
    """Replace a device's allocation error by a sentence with remedies.

    Raises:
        DeviceMemoryError: Replaces an error that says "out of memory".
    """
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise DeviceMemoryError(_describe_out_of_memory(config, world)) from error


def _describe_out_of_memory(config: CoreConfig, world: World) -> str:
    """Return which device is full, what lowers the memory, and the command that plans it."""
    device = device_of(world)
    device_bytes = device_memory(device)
    capacity = "" if device_bytes is None else f" of its {device_bytes / GIB:.1f} GiB"
    remedies = _list_memory_remedies(config)
    sentence = f"Out of memory on {device}{capacity} (rank {world.rank}): {remedies}."
    if config.replica_option:  # `llm-trainers plan` refuses it
        return sentence
    gpus_per_node = ranks_per_node(os.environ, world.world_size)
    num_nodes = -(-world.world_size // gpus_per_node)
    flags = [f"--nodes {num_nodes}", f"--gpus_per_node {gpus_per_node}"]
    if device_bytes is not None:
        flags.append(f"--memory_gib {device_bytes / GIB:.1f}")
    return (
        f"{sentence} `llm-trainers plan` with the options of this run and {' '.join(flags)} shows "
        "how the memory is used, and with --search the layouts that fit."
    )


def _list_memory_remedies(config: CoreConfig) -> str:
    """Return the options that can still lower the memory."""
    remedies = []
    micro_batch_size = device_batch_size(config)
    if micro_batch_size > 1 and not config.eval_only:
        remedies.append(f"lower --per_device_train_batch_size {micro_batch_size}")
    if config.per_device_eval_batch_size > 1:
        remedies.append(
            f"lower --per_device_eval_batch_size {config.per_device_eval_batch_size}"
            + ("" if config.eval_only else " if it happens in an evaluation")
        )
    if config.activation_checkpointing != "full" and not config.eval_only:
        remedies.append("recompute activations by --activation_checkpointing full")
    shard_options = "--data_parallel_shard_size, --tensor_parallel_size or --pipeline_parallel_size"
    remedies.append(f"shard the model over more ranks by {shard_options}")
    return ", or ".join(remedies)
