"""Settings of an optimizer that is named by its class."""

import json
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from llm.config.options import CLASS_CHOICE, option, option_group
from llm.errors import ConfigError, one_line
from llm.optim.options import OptimizerKind
from llm.trainers.gpt.config import CoreConfig

_OPTION_BY_ARGUMENT = {
    "lr": "--learning_rate",
    "weight_decay": "--weight_decay",
    "params": "the model",
}
"""What sets the arguments that every run gives to a class."""


@option_group("Optimizer by name", resume="state", extension=True)
class CustomOptimizerOptions(CoreConfig):
    """The settings of an optimizer that is named by its class."""

    OPTIMIZERS: ClassVar[Mapping[str, OptimizerKind]] = {
        CLASS_CHOICE: OptimizerKind(sharded=True),
    }

    optimizer_kwargs: str | None = option(
        None,
        "Further arguments of the optimizer's class as JSON, such as '{\"beta\": 0.9}'.",
        json=True,
    )
    optimizer_input: Literal["shards", "matrices"] | None = option(
        None,
        "Input of the optimizer's class if weights are sharded: shards, for an elementwise update, "
        "or whole matrices; by default as the class says.",
        resume="free",
    )


def parse_optimizer_kwargs(text: str | None) -> dict[str, Any]:
    """Return the arguments in `optimizer_kwargs`, with tuples for lists.

    Raises:
        ConfigError: The text is not a JSON object, or sets an argument that an option sets.
    """
    if text is None:
        return {}
    try:
        arguments = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"--optimizer_kwargs cannot be read ({one_line(error)}): it expects JSON, such as "
            f"'{{\"beta\": 0.9}}', not {text!r}."
        ) from None
    if not isinstance(arguments, dict):
        raise ConfigError(
            f"--optimizer_kwargs expects a JSON object, such as '{{\"beta\": 0.9}}', not {text!r}."
        )
    for name in arguments.keys() & _OPTION_BY_ARGUMENT.keys():
        raise ConfigError(
            f"--optimizer_kwargs sets {name}, which {_OPTION_BY_ARGUMENT[name]} sets; leave it out."
        )
    return {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in arguments.items()
    }
