"""Values that a run's options leave open: from its checkpoint, or from its device."""

import dataclasses
from typing import Any

import torch

from llm.checkpoint.format import Checkpoint
from llm.errors import ConfigError
from llm.metrics.hardware import device_memory, num_multiprocessors
from llm.models.compilation import can_compile
from llm.models.loss_chunks import LossChunks, default_chunks
from llm.parallel.accelerator import default_precision
from llm.runtime.rng import draw_seed
from llm.trainers.gpt.config import CoreConfig
from llm.trainers.gpt.recorded_options import DEVICE_OPTIONS, read_saved_options

_UNRECORDED_VALUES = {"router_dtype": "model"}
"""Values of options in `DEVICE_OPTIONS` for checkpoints that do not record them."""


def choose_device_options(
    config: CoreConfig, start: Checkpoint | None, device: torch.device
) -> dict[str, Any]:
    """Return the options in `DEVICE_OPTIONS`: as set, else the checkpoint's, else the defaults.

    Raises:
        ConfigError: A compiled run on a GPU is to be deterministic.
    """
    if start is not None and not config.eval_only:
        fixed, logged = (read_saved_options(config, start, kind) for kind in ("fixed", "logged"))
        recorded_options = _UNRECORDED_VALUES | fixed | logged
        values = {name: recorded_options[name] for name in DEVICE_OPTIONS}
    else:
        is_compiled = can_compile(device) and not config.deterministic
        values = {**default_precision(device), "torch_compile": is_compiled, "router_dtype": "fp32"}
    user_values = {name: getattr(config, name) for name in DEVICE_OPTIONS}
    values |= {name: value for name, value in user_values.items() if value is not None}
    if config.deterministic and values["torch_compile"] and device.type == "cuda":
        # On an H200 with PyTorch 2.11, the first gradient after a resume differed in 3 of 6 runs.
        raise ConfigError(
            "--deterministic cannot be combined with --torch_compile on a GPU: a compiled run may "
            "have other bits after a resume. Set --no_torch_compile, or leave --deterministic out."
        )
    return values


def choose_loss_chunks(
    config: CoreConfig, start: Checkpoint | None, device: torch.device
) -> LossChunks | None:
    """Return the chunks of the loss on an accelerator: the checkpoint's, or the device's.

    On another device, other chunks would change the order of sums. Runs that began before
    checkpoints recorded chunks have equal ones. A run that began on a CPU has none, and a CPU
    ignores them.
    """
    metadata: dict[str, Any] = {"loss_chunks": None}
    if start is not None and not config.eval_only:
        metadata = start.metadata
    if metadata.get("loss_chunks") is not None:
        return LossChunks(**metadata["loss_chunks"])
    if device.type == "cpu":
        return None
    multiprocessors = num_multiprocessors(device) if "loss_chunks" in metadata else None
    return default_chunks(device_memory(device), multiprocessors)


def use_checkpoint_batch_size(config: CoreConfig, resume_from: Checkpoint | None) -> CoreConfig:
    """Return the options with the checkpoint's micro-batch size instead of `auto`.

    Raises:
        ConfigError: A new run cannot search for its micro-batch.
    """
    if config.per_device_train_batch_size != "auto":
        return config
    if resume_from is None:
        if config.expert_parallel_size > 1:
            raise ConfigError(
                "--per_device_train_batch_size auto does not go with --expert_parallel_size, "
                "because the memory of a rank depends on how many tokens choose its experts; give "
                "a number. `llm-trainers plan` with auto computes one for equal loads."
            )
        return config
    size = read_saved_options(config, resume_from, "logged")["per_device_train_batch_size"]
    return dataclasses.replace(config, per_device_train_batch_size=size)


def choose_seed(config: CoreConfig, start: Checkpoint | None) -> int:
    """Return the seed from the options or the checkpoint, or a new one."""
    if config.seed is not None:
        return config.seed
    if start is not None:
        return int(start.metadata["fixed"]["seed"])
    return draw_seed()
