"""The layout of a run: how its ranks train its model.

It is chosen before process groups form. Strategies are imported when they are made, because job
scripts choose a layout without torch.
"""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from llm.parallel.options import ParallelOptions

if TYPE_CHECKING:
    from accelerate import Accelerator
    from transformers import PreTrainedModel

    from llm.checkpoint.format import Checkpoint, Stateful
    from llm.parallel.base import AcceleratedStrategy
    from llm.parallel.dims import ParallelDims


class Layout:
    """One model, on ranks that hold all of it or divide it; an extension returns a subclass."""

    def make_strategy(
        self,
        options: ParallelOptions,
        dims: "ParallelDims",
        accelerator: "Accelerator",
        *,
        init_weights: "Callable[[PreTrainedModel], None] | None",
    ) -> "AcceleratedStrategy":
        """Return the strategy of a run, which is given the model by its `prepare`.

        Args:
            options: Divide the model, or schedule its stages.
            dims: How the ranks divide one model.
            accelerator: The processes, devices and precision.
            init_weights: Fills a model on the meta device once it is divided; None for a model that
                has its weights.
        """
        if dims.pipeline > 1:
            from llm.parallel.pipeline.pipelined import PipelineStrategy

            return PipelineStrategy(options, accelerator, dims, init_weights=init_weights)
        if not dims.is_replicated:
            from llm.parallel.fsdp import ShardedStrategy

            return ShardedStrategy(options, accelerator, dims, init_weights=init_weights)
        from llm.parallel.base import AcceleratedStrategy

        return AcceleratedStrategy(accelerator)

    def load(self, checkpoint: "Checkpoint", parts: "Mapping[str, Stateful]") -> None:
        """Load a checkpoint into the parts of a run, by their names.

        Raises:
            CheckpointError: It is of another model or optimizer.
        """
        from llm.checkpoint.load import load_state

        load_state(checkpoint, parts)

    def metadata(self) -> dict[str, Any]:
        """Return what checkpoints record of it, for the run that resumes from them."""
        return {}

    def describe(self) -> list[str]:
        """Return lines about it for the log of a training."""
        return []
