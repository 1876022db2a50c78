"""The search for the largest micro-batch that fits (`--per_device_train_batch_size auto`).

It begins with the result of `llm-trainers plan`. If every rank holds the whole model, each rank
tries a forward and backward pass, and halves the batch until it fits into memory; all ranks then
take the smallest batch. Ranks that share a model take the plan's result: a rank that runs out of
memory would leave the others waiting in a collective.
"""

import contextlib
import dataclasses
import gc
import json
import logging
import os
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import torch

from llm.config.toml import to_toml
from llm.data.batch_plan import micro_batch_sizes
from llm.data.loader import TrainLoader
from llm.errors import ConfigError
from llm.metrics.hardware import GIB, device_memory, is_out_of_memory
from llm.parallel.base import AcceleratedStrategy
from llm.runtime.agreement import gather, on_rank0
from llm.runtime.files import temporary_folder
from llm.runtime.world import ranks_per_node
from llm.trainers.gpt.config import CoreConfig
from llm.trainers.gpt.training_run import TrainingRun, plan_training
from llm.trainers.gpt.trial_step import trial_step

_HOST_SHARE = 0.8
"""Usable fraction of the host's memory; libraries, the text and the page cache take the rest."""

logger = logging.getLogger("llm")


def find_batch_size(run: TrainingRun, strategy: AcceleratedStrategy) -> TrainingRun:
    """Return the run with the largest micro-batch that fits; every rank calls it.

    Args:
        run: The run, with a micro-batch of one sample.
        strategy: The prepared model; neither its weights nor its optimizer change.

    Raises:
        ConfigError: The run cannot be planned; raised on all ranks.
    """
    config = run.config
    if run.branch_from is not None and config.global_batch_size is None:
        # A branch keeps its parent's global batch, and the micro-batch must divide it.
        batch = run.plan.batch_schedule(run.block_size)
        config = dataclasses.replace(config, global_batch_size=batch, gradient_accumulation_steps=1)
    answer = on_rank0(lambda: ask_plan(config, strategy.world_size, strategy.device))
    if not isinstance(answer, int):
        raise ConfigError(f"--per_device_train_batch_size auto cannot be planned: {answer}")
    run, plan = dataclasses.replace(run, config=config), run.plan
    max_size = max(1, min(answer, plan.num_windows // plan.world_size))
    sizes = micro_batch_sizes(config, world_size=plan.world_size)
    size = max(size for size in sizes if size <= max_size)
    if run.dims.is_replicated:
        while size > 1 and not _fits_in_memory(size, run, strategy):
            size = max(smaller for smaller in sizes if smaller <= size // 2)
        size = min(gather(size))
    logger.info(
        f"--per_device_train_batch_size auto: {size} samples fit (the plan's figure: {answer}); a "
        "resume keeps them."
    )
    config = dataclasses.replace(config, per_device_train_batch_size=size)
    run = dataclasses.replace(run, config=config)
    plan, skipped, schedule = plan_training(run, run.samples, run.branch)
    return dataclasses.replace(run, plan=plan, skipped=skipped, schedule=schedule)


def _fits_in_memory(size: int, run: TrainingRun, strategy: AcceleratedStrategy) -> bool:
    """Return whether a step with micro-batches of this size fits into this rank's memory."""
    samples = size * run.plan.world_size
    # Gradients accumulate over two micro-batches if a step has several.
    accumulates = run.plan.global_batch_size > samples or run.config.gradient_accumulation_steps > 1
    loader = TrainLoader(
        samples=run.samples,
        plan=dataclasses.replace(
            run.plan, micro_batch_size=size, global_batch_size=samples * (1 + accumulates)
        ),
        rank=strategy.data_rank,
        device=strategy.device,
        document_boundaries=run.document_boundaries,
    )
    try:
        with closing(loader.steps(0)) as batches:
            trial_step(strategy, next(batches).micro_batches)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
    else:
        return True
    gc.collect()  # after the `except`: its traceback holds the tensors of the step
    if strategy.device.type != "cpu":
        torch.accelerator.memory.empty_cache()
    return False


def ask_plan(config: CoreConfig, ranks: int, device: torch.device) -> int | str:
    """Return the micro-batch that fits according to `llm-trainers plan`, or its error.

    A subprocess plans, because planning forms process groups and this process already has some.
    """
    per_node = ranks_per_node(os.environ, ranks)
    per_node = per_node if ranks % per_node == 0 else ranks
    on_host = device.type == "cpu"
    memory: float | None = host_memory() if on_host else device_memory(device)
    if on_host and memory is not None:
        memory *= _HOST_SHARE / per_node
    with temporary_folder() as folder:
        file = folder / "config.toml"
        plan_config = dataclasses.replace(config, per_device_train_batch_size="auto")
        file.write_text(to_toml(plan_config), encoding="utf-8")
        command = [sys.executable, "-m", "llm", "plan", str(file), "--json"]
        command += ["--nodes", str(ranks // per_node), "--gpus_per_node", str(per_node)]
        command += ["--device", "cpu"] if on_host else []
        command += [] if memory is None else ["--memory_gib", f"{memory / GIB:.4f}"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode in (0, 1):
        return int(json.loads(done.stdout)["micro_batch_size"])
    return done.stderr.strip().rpartition("error: ")[2]


def host_memory(root: Path = Path("/")) -> int | None:
    """Return the bytes of host memory that this process's control groups allow.

    Args:
        root: The folder with `proc` and `sys`.
    """
    limits = [device_memory(torch.device("cpu"))]
    with contextlib.suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, group = line.split(":", 2)
            if controllers not in ("", "memory"):  # version 2 has one line without names
                continue
            folder = root / "sys/fs/cgroup" / controllers
            name = "memory.limit_in_bytes" if controllers else "memory.max"
            # In a container the path may belong to the host; the container's path is then the root.
            for path in (Path(group), *Path(group).parents):
                with contextlib.suppress(OSError, ValueError):  # "max" means no limit
                    limits.append(int((folder / path.relative_to("/") / name).read_text()))
    return min((limit for limit in limits if limit is not None), default=None)
