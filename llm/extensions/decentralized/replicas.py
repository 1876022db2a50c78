"""The layout of replicas with separate weights, which gossip or DiLoCo averages."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from llm.extensions.decentralized.modes import DiLoCo, Gossip
from llm.parallel.layout import Layout
from llm.parallel.options import ParallelOptions
from llm.runtime.logging import counted

if TYPE_CHECKING:
    from accelerate import Accelerator
    from transformers import PreTrainedModel

    from llm.checkpoint.format import Checkpoint, Stateful
    from llm.parallel.base import AcceleratedStrategy
    from llm.parallel.dims import ParallelDims

logger = logging.getLogger("llm")


@dataclass(frozen=True, kw_only=True)
class ReplicaLayout(Layout):
    """Replicas of the model that train in parallel, each with separate weights and optimizer.

    Attributes:
        num_replicas: Number of replicas.
        ranks_per_replica: Number of consecutive ranks that train one of them.
        averaging: Gossip or DiLoCo, with its settings.
        accum_steps: Steps of a block of AccumAdamW; None for another optimizer.
        averages_moments: Whether the mean of several replicas' optimizer states is one.
        description: A line for the log.
    """

    num_replicas: int
    ranks_per_replica: int
    averaging: Gossip | DiLoCo
    accum_steps: int | None
    averages_moments: bool
    description: str

    def make_strategy(
        self,
        options: ParallelOptions,
        dims: "ParallelDims",
        accelerator: "Accelerator",
        *,
        init_weights: "Callable[[PreTrainedModel], None] | None",
    ) -> "AcceleratedStrategy":
        """Return the strategy of replicas, which are sharded if their ranks divide a model."""
        from llm.extensions.decentralized.decentralized import DecentralizedStrategy
        from llm.extensions.decentralized.sharded_replicas import ShardedReplicas

        if isinstance(self.averaging, Gossip) and not dims.is_replicated:
            return ShardedReplicas(
                self.averaging, options, accelerator, dims, init_weights=init_weights
            )
        return DecentralizedStrategy(
            self.averaging, accelerator, ranks_per_replica=self.ranks_per_replica
        )

    def load(self, checkpoint: "Checkpoint", parts: "Mapping[str, Stateful]") -> None:
        """Load a checkpoint, possibly saved with another number of replicas."""
        from llm.checkpoint.load import load_state, read_tensors
        from llm.extensions.decentralized.decentralized import DecentralizedStrategy

        num_saved_replicas = int(checkpoint.metadata.get("replicas", 1))
        if num_saved_replicas == self.num_replicas:
            load_state(checkpoint, parts)
            return
        load_state(checkpoint, {name: part for name, part in parts.items() if name != "strategy"})
        strategy = parts["strategy"]
        assert isinstance(strategy, DecentralizedStrategy)
        strategy.load_mean_state(
            lambda tensors: read_tensors(
                checkpoint,
                {f"strategy/{path}": tensor for path, tensor in tensors.items()},
                required_prefixes=(),
            ),
            num_replicas=num_saved_replicas if self.averages_moments else 1,
        )
        self._log_start_from_mean(num_saved_replicas)

    def _log_start_from_mean(self, num_saved_replicas: int) -> None:
        """Log which state the replicas begin with if a checkpoint has another number of them."""
        source = (
            "the mean of the weights and moments"
            if self.averages_moments
            else "the mean of the weights, and the optimizer's state of the first replica"
        )
        logger.info(
            f"The checkpoint holds {counted(num_saved_replicas, 'replica')} of the model and this "
            f"run has {self.num_replicas}: they begin with {source}."
        )

    def metadata(self) -> dict[str, Any]:
        """Return the number of replicas, and the steps of AccumAdamW's blocks."""
        return {"replicas": self.num_replicas, "accum_steps": self.accum_steps}

    def describe(self) -> list[str]:
        """Return a line on how the replicas train and what they exchange."""
        return [self.description]
