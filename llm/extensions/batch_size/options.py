"""Implements the core's option `per_device_train_batch_size auto`; adds no options."""

from typing import TYPE_CHECKING

from llm.config.options import option_group
from llm.trainers.gpt.config import CoreConfig
from llm.trainers.gpt.seams import Extension

if TYPE_CHECKING:
    from llm.parallel.base import AcceleratedStrategy
    from llm.trainers.gpt.run_setup import TrainSetup


@option_group("Batch size", extension=True)
class BatchSizeOptions(Extension):
    """The search for a micro-batch."""

    @property
    def finds_batch_size(self) -> bool:
        """Whether `per_device_train_batch_size auto` works: it does."""
        return True

    def problems(self) -> list[str]:
        """Return a sentence if the search cannot plan the run."""
        if self.per_device_train_batch_size != "auto" or not self.several_models:
            return []
        return [
            f"--per_device_train_batch_size auto cannot plan {self.several_models}; give a number."
        ]

    def adjust(
        self, config: CoreConfig, setup: "TrainSetup", strategy: "AcceleratedStrategy"
    ) -> "tuple[CoreConfig, TrainSetup]":
        """Return options and setup with the micro-batch that fits, if a new run asks for it.

        Raises:
            ConfigError: On all ranks, why the run cannot be planned.
        """
        if self.per_device_train_batch_size != "auto" or setup.resume_from is not None:
            return config, setup
        from llm.extensions.batch_size.find_batch_size import find_batch_size

        return find_batch_size(config, setup, strategy)
