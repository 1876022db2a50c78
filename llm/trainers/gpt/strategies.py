"""Replicas of the model that train side by side: how many, how they average, how they go on."""

import logging
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from accelerate import Accelerator
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from llm.checkpoint.format import Checkpoint, Stateful
from llm.checkpoint.load import load_state, read_tensors
from llm.errors import CheckpointError, ConfigError
from llm.models.sizes import find_blocks
from llm.parallel.base import AcceleratedStrategy
from llm.parallel.context_attention import divide_attention
from llm.parallel.dims import ParallelDims
from llm.parallel.fsdp import ShardedStrategy
from llm.parallel.gossip.averaging import GossipAverager
from llm.parallel.gossip.decentralized import Averaging, DecentralizedStrategy
from llm.parallel.gossip.diloco import OuterOptimizer
from llm.parallel.gossip.rounds import Round, check_topology, make_rounds
from llm.parallel.gossip.sharded_replicas import ShardedReplicas
from llm.parallel.pipeline.pipelined import PipelineStrategy
from llm.parallel.pipeline.split import find_pipeline_modules
from llm.parallel.pipeline.stage import cut_model
from llm.parallel.sharded_init import fill_model
from llm.parallel.tensor import divide_layers
from llm.parallel.tensor_plans import tensor_plan
from llm.runtime.world import ranks_per_node
from llm.trainers.gpt.config import GPTConfig

MOST_ACCUM_STEPS = 8

logger = logging.getLogger("llm")


@dataclass(frozen=True, kw_only=True)
class Replicas:
    """Models that train side by side, each with weights and an optimizer of its own.

    Attributes:
        number: How many; 1 where all ranks train one model.
        ranks_each: How many ranks in a row train one of them.
        rounds: Which replicas average in which round of gossip; empty without gossip.
        accum_steps: Steps of a block of AccumAdamW; None for AdamW.
    """

    number: int
    ranks_each: int
    rounds: tuple[Round, ...]
    accum_steps: int | None

    def metadata(self) -> dict[str, int | None]:
        """What a checkpoint says of them, for the run that goes on from it."""
        return {"replicas": self.number, "accum_steps": self.accum_steps}


def plan_replicas(config: GPTConfig, world_size: int, resume_from: Checkpoint | None) -> Replicas:
    """Lay out the replicas over the ranks that there are.

    Raises:
        ConfigError: The topology does not allow so many; with the numbers that it does.
    """
    mode = "allreduce" if config.eval_only else config.data_parallel
    number, ranks_each, rounds = world_size, 1, []
    if mode == "allreduce":
        number, ranks_each = 1, world_size
    elif mode == "gossip":
        on_node = ranks_per_node(os.environ, world_size)
        check_topology("complete", ranks=world_size, ranks_per_node=on_node)
        if config.gossip_group == "nodes":
            _check_whole_nodes(config, on_node)
            number, ranks_each, on_node = world_size // on_node, on_node, 1
        check_topology(config.topology, ranks=number, ranks_per_node=on_node)
        rounds = make_rounds(config.topology, ranks=number, ranks_per_node=on_node)
    return Replicas(
        number=number,
        ranks_each=ranks_each,
        rounds=tuple(rounds),
        accum_steps=_accum_steps(config, number, resume_from),
    )


def _check_whole_nodes(config: GPTConfig, ranks_per_node: int) -> None:
    size = config.data_parallel_shard_size
    if size not in (1, ranks_per_node):
        raise ConfigError(
            f"--gossip_group nodes divides a replica over all ranks of a node, and there are "
            f"{ranks_per_node} on each, not the {size} of --data_parallel_shard_size."
        )


def _accum_steps(config: GPTConfig, replicas: int, resume_from: Checkpoint | None) -> int | None:
    if config.moment_update_steps is not None:
        return config.moment_update_steps
    if resume_from is not None and "accum_steps" in resume_from.metadata:
        # On other ranks the blocks stay what they were: the optimizer has counted them.
        saved: int | None = resume_from.metadata["accum_steps"]
        return saved
    steps = min(MOST_ACCUM_STEPS, replicas)
    if config.optimizer is None:
        # With blocks of one step it would be AdamW, which has a fused kernel.
        return steps if config.data_parallel == "gossip" and steps > 1 else None
    return steps if config.optimizer == "accumadamw" else None


def choose_strategy(
    config: GPTConfig,
    replicas: Replicas,
    layout: ParallelDims,
    accelerator: Accelerator,
    model: PreTrainedModel,
    *,
    seed: int,
) -> AcceleratedStrategy:
    """The strategy of the layout or of `data_parallel`; an evaluation needs no replicas.

    Args:
        config: The options.
        replicas: How many models train side by side.
        layout: How the ranks divide one.
        accelerator: Has formed the process groups.
        model: The model; on the meta device if each rank shall draw what it holds of it.
        seed: The run's seed.
    """
    fill = None
    if model.device.type == "meta":
        fill = partial(fill_model, config, seed=seed, device=accelerator.device)
    if layout.pipeline > 1:
        return PipelineStrategy(
            accelerator=accelerator,
            mixed_precision=config.mixed_precision,
            layout=layout,
            blocks=find_blocks(model),
            cut=partial(cut_model, find_pipeline_modules(model)),
            schedule=config.pipeline_schedule,
            virtual_stages=config.virtual_stages,
            divide_layers=_layer_division(model) if layout.tensor > 1 else None,
            fill=fill,
        )
    if not layout.is_replicated:
        if config.data_parallel == "gossip" and not config.eval_only:
            blocks = find_blocks(model)
            return _decentralized(
                config, replicas, accelerator, layout=layout, blocks=blocks, fill=fill
            )
        return ShardedStrategy(
            accelerator=accelerator,
            mixed_precision=config.mixed_precision,
            layout=layout,
            blocks=find_blocks(model),
            divide_layers=_layer_division(model) if layout.tensor > 1 else None,
            divide_attention=partial(divide_attention, model),
            fill=fill,
        )
    if config.data_parallel == "allreduce" or config.eval_only:
        return AcceleratedStrategy(accelerator=accelerator, mixed_precision=config.mixed_precision)
    return _decentralized(config, replicas, accelerator)


def _decentralized(
    config: GPTConfig, replicas: Replicas, accelerator: Accelerator, **division: Any
) -> DecentralizedStrategy:
    """Replicas that gossip, each divided over its ranks or not, or that step together at times."""

    def make_averaging(tensors: dict[str, Tensor]) -> Averaging:
        if config.data_parallel == "gossip":
            return GossipAverager(
                list(tensors.values()),
                rounds=replicas.rounds,
                rank=accelerator.process_index,
                ranks_per_replica=replicas.ranks_each,
                divided=bool(division),
                overlap=config.gossip_order == "overlap",
            )
        return OuterOptimizer(
            tensors,
            world_size=replicas.number,
            # One rank has nobody to step with: it trains on as it would without.
            sync_every=config.inner_steps if replicas.number > 1 else sys.maxsize,
            learning_rate=config.outer_learning_rate,
            momentum=config.outer_momentum,
        )

    strategy = ShardedReplicas if division else DecentralizedStrategy
    return strategy(
        accelerator=accelerator,
        mixed_precision=config.mixed_precision,
        make_averaging=make_averaging,
        ranks_per_replica=replicas.ranks_each,
        **division,
    )


def _layer_division(model: PreTrainedModel) -> Callable[[DeviceMesh], None]:
    plan = tensor_plan(model)
    return partial(divide_layers, model, styles=plan.styles, per_rank=plan.per_rank)


def load_checkpoint(found: Checkpoint, parts: Mapping[str, Stateful]) -> None:
    """Bring a run to the state of a checkpoint, which other numbers of replicas may have saved.

    Raises:
        CheckpointError: It is that of another model or optimizer, or of another data_parallel.
    """
    strategy = parts["strategy"]
    saved = int(found.metadata.get("replicas", 1))
    mode = found.metadata["fixed"].get("data_parallel", "allreduce")
    if isinstance(strategy, DecentralizedStrategy) != (mode != "allreduce"):
        raise CheckpointError(
            f"{found.path} was written with --data_parallel {mode}, whose optimizer cannot be "
            "taken over; start another run from its weights with --init_from."
        )
    if not isinstance(strategy, DecentralizedStrategy) or saved == strategy.num_replicas:
        load_state(found, parts)
        return
    load_state(found, {name: part for name, part in parts.items() if name != "strategy"})
    strategy.load_averaged(
        lambda tensors: read_tensors(
            found, {f"strategy/{path}": tensor for path, tensor in tensors.items()}, of=()
        ),
        replicas=saved,
    )
    logger.info(
        f"The checkpoint holds {saved} replicas of the model and this run has "
        f"{strategy.num_replicas}: they begin with the mean of the weights and moments."
    )
