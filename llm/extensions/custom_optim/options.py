"""The extension of optimizers by name."""

import json
from typing import TYPE_CHECKING

from llm.config.options import names_class, non_default
from llm.errors import ConfigError
from llm.extensions.custom_optim.class_settings import (
    CustomOptimizerOptions,
    parse_optimizer_kwargs,
)
from llm.trainers.gpt.seams import Extension

if TYPE_CHECKING:
    from llm.optim.run_optimizer import OptimizerFactory
    from llm.parallel.layout import Layout
    from llm.trainers.gpt.seams import Run


class CustomOptimizerExtension(Extension[CustomOptimizerOptions]):
    """Makes an optimizer of a class from outside of this package."""

    def find_problems(self) -> list[str]:
        """Return a sentence for settings without a class, or that a class cannot have."""
        options = self.options
        if not names_class(options.optimizer):
            return [
                f"--{name} is for the class in --optimizer package.module:Class; name one, or "
                "leave it out."
                for name in ("optimizer_kwargs", "optimizer_input")
                if getattr(options, name) is not None
            ]
        problems = []
        try:
            parse_optimizer_kwargs(options.optimizer_kwargs)
        except ConfigError as error:
            problems.append(str(error))
        core_arguments = {
            name: value
            for name, value in non_default(options).items()
            if name in ("momentum", "betas", "eps")
        }
        if core_arguments:  # which the core's rules refuse
            problems.append(
                f"Arguments of the class {options.optimizer} are set with --optimizer_kwargs, such "
                f"as '{json.dumps(core_arguments)}'."
            )
        if options.per_device_train_batch_size == "auto":
            problems.append(
                "--per_device_train_batch_size auto would not measure the state of --optimizer "
                f"{options.optimizer}, which the class makes in its first step; give a number."
            )
        return problems

    def prepare_run(self, run: "Run") -> None:
        """Import the class.

        Raises:
            ConfigError: It cannot be imported, or does not take the arguments.
        """
        if names_class(self.options.optimizer):
            from llm.extensions.custom_optim.import_class import import_optimizer

            import_optimizer(self.options)

    def make_optimizer_factory(
        self, *, seed: int, layout: "Layout | None"
    ) -> "OptimizerFactory | None":
        """Return what makes an optimizer of the class, after a trial; None for other optimizers.

        Raises:
            ConfigError: The class cannot be imported, or cannot train this run.
        """
        if not names_class(self.options.optimizer):
            return None
        from llm.extensions.custom_optim.class_factory import make_class_factory

        return make_class_factory(self.options, is_run=layout is not None)
