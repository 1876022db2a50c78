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
        raise DeviceMemoryError(_out_of_memory(config, world)) from error


def _out_of_memory(config: CoreConfig, world: World) -> str:
    device = device_of(world)
    total = device_memory(device)
    size = "" if total is None else f" of its {total / GIB:.1f} GiB"
    per_node = ranks_per_node(os.environ, world.world_size)
    sentence = f"Out of memory on {device}{size} (rank {world.rank}): {_memory_remedies(config)}."
    if config.several_models:  # `llm-trainers plan` refuses it
        return sentence
    flags = [f"--nodes {-(-world.world_size // per_node)}", f"--gpus_per_node {per_node}"]
    if total is not None:
        flags.append(f"--memory_gib {total / GIB:.1f}")
    return (
        f"{sentence} `llm-trainers plan` with the options of this run and {' '.join(flags)} shows "
        "how the memory is used, and with --search the layouts that fit."
    )


def _memory_remedies(config: CoreConfig) -> str:
    """Return the options that can still lower the memory."""
    remedies = []
    size = device_batch_size(config)
    if size > 1 and not config.eval_only:
        remedies.append(f"lower --per_device_train_batch_size {size}")
    if config.per_device_eval_batch_size > 1:
        remedies.append(
            f"lower --per_device_eval_batch_size {config.per_device_eval_batch_size}"
            + ("" if config.eval_only else " if it happens in an evaluation")
        )
    if config.activation_checkpointing != "full" and not config.eval_only:
        remedies.append("recompute activations by --activation_checkpointing full")
    sizes = "--data_parallel_shard_size, --tensor_parallel_size or --pipeline_parallel_size"
    remedies.append(f"shard the model over more ranks by {sizes}")
    return ", or ".join(remedies)
