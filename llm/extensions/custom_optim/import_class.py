"""Imports the class of an optimizer, and finds its version."""

import functools
import hashlib
import importlib
import importlib.metadata
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from llm.errors import ConfigError, one_line
from llm.extensions.custom_optim.class_settings import (
    CustomOptimizerOptions,
    parse_optimizer_kwargs,
)

MakeOptimizer = Callable[[list[dict[str, Any]], float], torch.optim.Optimizer]
"""From parameter groups with their weight decay, and a learning rate."""


@dataclass(frozen=True, kw_only=True)
class OptimizerClass:
    """The class of an optimizer, with its arguments.

    Attributes:
        name: Its name, as `package.module:Class`.
        cls: The class.
        arguments: Its arguments besides parameters, learning rate and weight decay.
        version: Its version, as `find_version` returns it.
    """

    name: str
    cls: type[torch.optim.Optimizer]
    arguments: dict[str, Any]
    version: str

    def make(self, groups: list[dict[str, Any]], learning_rate: float) -> torch.optim.Optimizer:
        """Return an optimizer."""
        return self.cls(groups, lr=learning_rate, **self.arguments)  # type: ignore[call-arg]


def import_optimizer(options: CustomOptimizerOptions) -> OptimizerClass:
    """Return the class of `optimizer` with the arguments of `optimizer_kwargs`.

    Raises:
        ConfigError: It cannot be imported, is not an optimizer, or does not take the arguments.
    """
    assert options.optimizer is not None
    cls = _import_class(options.optimizer)
    arguments = parse_optimizer_kwargs(options.optimizer_kwargs)
    _check_signature(options, cls, arguments)
    return OptimizerClass(
        name=options.optimizer, cls=cls, arguments=arguments, version=find_version(cls)
    )


def _import_class(name: str) -> type[torch.optim.Optimizer]:
    """Return the class with a name of the form `package.module:Class`.

    Raises:
        ConfigError: The module or the class does not exist, or the class is not an optimizer.
    """
    module_name, _, class_name = name.partition(":")
    module = _import_module(name, module_name)
    try:
        cls = functools.reduce(getattr, class_name.split("."), module)
    except AttributeError:
        raise ConfigError(
            f"--optimizer {name}: the module {module_name} has no class {class_name}."
        ) from None
    if not (isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)):
        raise ConfigError(
            f"--optimizer {name}: {class_name} is not a subclass of torch.optim.Optimizer."
        )
    return cls


def _import_module(name: str, module_name: str) -> object:
    """Import the module of a class; one that is not installed may be in the current folder."""
    package = module_name.partition(".")[0]
    # A module that is imported already may have no spec, such as __main__, and find_spec raises.
    if package not in sys.modules and importlib.util.find_spec(package) is None:
        if not any(Path(package).with_suffix(suffix).exists() for suffix in ("", ".py")):
            raise ConfigError(
                f"--optimizer {name}: the module {package} is neither installed nor in "
                f"{Path.cwd()}; install its package, or add its folder to PYTHONPATH."
            )
        sys.path.append(os.getcwd())
    try:
        return importlib.import_module(module_name)
    except Exception as error:
        raise ConfigError(
            f"--optimizer {name}: the module {module_name} cannot be imported "
            f"({type(error).__name__}: {one_line(error)})."
        ) from error


def _check_signature(
    options: CustomOptimizerOptions, cls: type[torch.optim.Optimizer], arguments: dict[str, Any]
) -> None:
    """Refuse a class that does not take the arguments, or that needs what a run does not offer."""
    name = options.optimizer
    closure = inspect.signature(cls.step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        raise ConfigError(
            f"--optimizer {name} needs a closure, which computes the loss again within a step; the "
            "trainer has none. Choose another class."
        )
    if callable(getattr(cls, "eval", None)):
        raise ConfigError(
            f"--optimizer {name} has other weights for training than for evaluation (its method "
            "eval), which the trainer does not switch; choose another class."
        )
    parameters = inspect.signature(cls).parameters
    if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        if unknown_names := [argument for argument in arguments if argument not in parameters]:
            accepted_names = ", ".join(
                p for p in parameters if p not in ("params", "lr", "weight_decay")
            )
            raise ConfigError(
                f"--optimizer_kwargs sets {unknown_names[0]}, which {name} does not take; it takes "
                f"{accepted_names or 'no argument'}."
            )
        if "lr" not in parameters:
            raise ConfigError(
                f"--optimizer {name} takes no lr, which the learning-rate schedule sets at each "
                "step; choose another class."
            )
        if options.weight_decay and "weight_decay" not in parameters:
            raise ConfigError(
                f"--optimizer {name} takes no weight_decay; leave --weight_decay out, or set it "
                "to 0."
            )


def find_version(cls: type) -> str:
    """Return the version of a class: of its installed package, or else a digest of its file."""
    package = cls.__module__.partition(".")[0]
    for distribution in _read_distributions().get(package, ()):
        return f"{distribution} {importlib.metadata.version(distribution)}"
    file = inspect.getsourcefile(cls)
    if file is None:
        return "unknown version"
    return f"SHA-256 {hashlib.sha256(Path(file).read_bytes()).hexdigest()[:16]} of its file"


_read_distributions = functools.cache(importlib.metadata.packages_distributions)
"""Returns the distributions of each installed package; reading all metadata takes 0.4 s."""
