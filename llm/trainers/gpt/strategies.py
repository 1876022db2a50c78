"""Choose the strategy of a run, and the number of replicas of the model."""

import logging
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from accelerate import Accelerator
from transformers import PreTrainedModel

from llm.checkpoint.format import Checkpoint, Stateful
from llm.checkpoint.load import load_state, read_tensors
from llm.errors import CheckpointError
from llm.models.transforms import Transform
from llm.models.weight_files import find_weight_files
from llm.parallel.base import AcceleratedStrategy
from llm.parallel.dims import ParallelDims
from llm.parallel.fsdp import ShardedStrategy
from llm.parallel.gossip.decentralized import DecentralizedStrategy
from llm.parallel.gossip.rounds import Round
from llm.parallel.gossip.sharded_replicas import ShardedReplicas
from llm.parallel.pipeline.pipelined import PipelineStrategy
from llm.parallel.sharded_init import fill_model
from llm.runtime.counts import counted
from llm.runtime.world import ranks_per_node
from llm.trainers.gpt.config import CoreConfig
from llm.trainers.gpt.ranks import divide_ranks

MOST_ACCUM_STEPS = 8

logger = logging.getLogger("llm")


@dataclass(frozen=True, kw_only=True)
class Replicas:
    """Copies of the model that train in parallel, each with separate weights and optimizer.

    Attributes:
        number: Number of replicas; 1 if all ranks train one model.
        ranks_each: Number of consecutive ranks that train one of them.
        rounds: The groups of replicas that average in each round of gossip; empty without gossip.
        accum_steps: Steps of a block of AccumAdamW; None for AdamW.
    """

    number: int
    ranks_each: int
    rounds: tuple[Round, ...]
    accum_steps: int | None

    def metadata(self) -> dict[str, int | None]:
        """Return the record of the replicas in a checkpoint."""
        return {"replicas": self.number, "accum_steps": self.accum_steps}


def plan_replicas(config: CoreConfig, world_size: int, resume_from: Checkpoint | None) -> Replicas:
    """Divide the ranks into replicas.

    Raises:
        ConfigError: The topology does not allow this number; the message names allowed ones.
    """
    number, ranks_each, rounds = divide_ranks(
        config, ranks=world_size, ranks_per_node=ranks_per_node(os.environ, world_size)
    )
    return Replicas(
        number=number,
        ranks_each=ranks_each,
        rounds=tuple(rounds),
        accum_steps=_accum_steps(config, number, resume_from),
    )


def _accum_steps(config: CoreConfig, replicas: int, resume_from: Checkpoint | None) -> int | None:
    if config.moment_update_steps is not None:
        return config.moment_update_steps
    if resume_from is not None and "accum_steps" in resume_from.metadata:
        # The optimizer counts steps within a block, regardless of the present number of replicas.
        saved: int | None = resume_from.metadata["accum_steps"]
        return saved
    steps = min(MOST_ACCUM_STEPS, replicas)
    if config.optimizer is None:
        # With blocks of one step it would be AdamW, which has a fused kernel.
        return steps if config.data_parallel == "gossip" and steps > 1 else None
    return steps if config.optimizer == "accumadamw" else None


def choose_strategy(
    config: CoreConfig,
    replicas: Replicas,
    dims: ParallelDims,
    accelerator: Accelerator,
    model: PreTrainedModel,
    *,
    weights_from: str | None,
    seed: int,
    transforms: Sequence[Transform],
) -> AcceleratedStrategy:
    """Return the strategy of a run; its `prepare` receives the model.

    Args:
        config: The options.
        replicas: The replicas; an evaluation has one.
        dims: How the ranks divide one model.
        accelerator: The processes, devices and precision.
        model: The model; on the meta device if each rank draws or reads its shards.
        weights_from: Source of pretrained weights, or None.
        seed: The run's seed.
        transforms: Changes of extensions to the model.
    """
    init_weights = None
    if model.device.type == "meta":
        files = find_weight_files(model, weights_from) if weights_from else None
        init_weights = partial(
            fill_model,
            config,
            seed=seed,
            device=accelerator.device,
            files=files or (),
            transforms=transforms,
        )
    decentralized = config.data_parallel != "allreduce" and not config.eval_only
    if decentralized and not dims.is_replicated:
        return ShardedReplicas(
            config, accelerator, dims, rounds=replicas.rounds, init_weights=init_weights
        )
    if decentralized:
        if replicas.number == 1:
            # With one replica, DiLoCo's outer step averages nothing: it trains as without it.
            config = replace(config, inner_steps=sys.maxsize)
        return DecentralizedStrategy(
            config, accelerator, rounds=replicas.rounds, ranks_per_replica=replicas.ranks_each
        )
    if dims.pipeline > 1:
        return PipelineStrategy(config, accelerator, dims, init_weights=init_weights)
    if not dims.is_replicated:
        return ShardedStrategy(
            accelerator,
            dims,
            unsharded_gradients=config.unsharded_gradients,
            init_weights=init_weights,
        )
    return AcceleratedStrategy(accelerator)


def load_checkpoint(checkpoint: Checkpoint, parts: Mapping[str, Stateful]) -> None:
    """Load a checkpoint, possibly saved with another number of replicas.

    Raises:
        CheckpointError: It belongs to another model, optimizer or data_parallel.
    """
    strategy = parts["strategy"]
    saved = int(checkpoint.metadata.get("replicas", 1))
    mode = checkpoint.metadata["fixed"].get("data_parallel", "allreduce")
    if isinstance(strategy, DecentralizedStrategy) != (mode != "allreduce"):
        raise CheckpointError(
            f"{checkpoint.path} was written with --data_parallel {mode}, and its optimizer state "
            "cannot be converted; start another run from its weights with --init_from."
        )
    if not isinstance(strategy, DecentralizedStrategy) or saved == strategy.num_replicas:
        load_state(checkpoint, parts)
        return
    load_state(checkpoint, {name: part for name, part in parts.items() if name != "strategy"})
    strategy.load_averaged(
        lambda tensors: read_tensors(
            checkpoint, {f"strategy/{path}": tensor for path, tensor in tensors.items()}, of=()
        ),
        replicas=saved,
    )
    logger.info(
        f"The checkpoint holds {counted(saved, 'replica')} of the model and this run has "
        f"{strategy.num_replicas}: they begin with the mean of the weights and moments."
    )
