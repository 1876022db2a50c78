"""Initial weights that depend on the seed and the parameter's name, and on nothing else.

Every module is initialised by its own Hugging Face code, in the library's own order. What changes
is where the random numbers come from: the generator is seeded anew, from (seed, name), before each
write to a named parameter. A parameter's start therefore does not depend on how many layers, ranks
or stages come before it, and can be drawn alone.
"""

import copy
import hashlib
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from llm.runtime.rng import seed_torch


def key(seed: int, name: str) -> int:
    """A generator seed that is a pure function of the run's seed and of a name."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


@contextmanager
def keyed_generator(seed: int, name: str, device: torch.device) -> Iterator[None]:
    """Draw from a generator keyed by (seed, name); the caller's generators are left as they were.

    Args:
        seed: The run's seed.
        name: What the draws are for.
        device: Where the draws happen.
    """
    devices = [] if device.type in ("cpu", "meta") else [device]
    with torch.random.fork_rng(devices=devices, device_type=device.type if devices else "cuda"):
        seed_torch(key(seed, name))
        yield


def materialize(model: PreTrainedModel, *, seed: int, device: torch.device) -> None:
    """Give a model that was built on the meta device its memory and its initial weights.

    Nothing is drawn or copied on the host when `device` is an accelerator.

    Args:
        model: A model on the meta device; changed in place.
        seed: The run's seed.
        device: Where the parameters and buffers will live.
    """
    model.to_empty(device=device)
    for name in model.all_tied_weights_keys:
        # As when loading: what will be tied to another weight is not drawn for nothing.
        model.get_parameter(name)._is_hf_initialized = True
    draws = KeyedDraws(model, seed)
    draws.run(device)
    unwritten = draws.names - draws.written - set(model.all_tied_weights_keys)
    if unwritten:
        _copy_constructed(model, unwritten, seed=seed)
    model.tie_weights()


class KeyedDraws(TorchFunctionMode):
    """Seeds the generator from a parameter's name before anything writes to that parameter.

    A draw that fills no parameter directly (Mamba computes a bias from `torch.rand`) continues
    from the module that is being initialised, whose name seeds the generator as well.

    Args:
        model: What is initialised.
        seed: The run's seed.

    Attributes:
        names: All parameters and buffers.
        written: Those that were written to.
    """

    def __init__(self, model: PreTrainedModel, seed: int) -> None:
        super().__init__()
        tensors = itertools.chain(model.named_parameters(), model.named_buffers())
        # Not by address, which tensors on the meta device have none of.
        self._name_of = {tensor.untyped_storage()._cdata: name for name, tensor in tensors}
        self._model = model
        self._seed = seed
        self.names = set(self._name_of.values())
        self.written: set[str] = set()

    def run(self, device: torch.device) -> None:
        """Let the model initialise itself.

        Args:
            device: Where the draws happen.
        """
        names = {module: name for name, module in self._model.named_modules()}

        def announce(module: nn.Module) -> None:
            seed_torch(key(self._seed, names[module]))

        announced = _announced_modules(self._model, announce)
        with keyed_generator(self._seed, "model", device), self, announced:
            self._model.initialize_weights()

    def name_of(self, tensor: Any) -> str | None:
        """Which parameter or buffer a tensor is a part of."""
        if not isinstance(tensor, torch.Tensor):
            return None
        return self._name_of.get(tensor.untyped_storage()._cdata)

    def seed_draw(self, name: str, target: torch.Tensor) -> None:
        """Seed the generator for a write to a parameter, or to a slice of it."""
        self.written.add(name)
        # Two slices of one parameter must not start alike.
        seed_torch(key(self._seed, f"{name}/{target.storage_offset()}"))

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        # torch.nn.init passes its own functions through here, with the tensor by keyword.
        target: Any = kwargs.get("tensor", args[0] if args else None)
        name = self.name_of(target)
        if name is not None and writes_in_place(func):
            self.seed_draw(name, target)
        return func(*args, **kwargs)


def writes_in_place(func: Any) -> bool:
    """Whether a function, by its name, writes to its first argument: `normal_`, `copy_` ..."""
    name = getattr(func, "__name__", "")
    return name.endswith("_") and not name.endswith("__")


@contextmanager
def _announced_modules(
    model: PreTrainedModel, announce: Callable[[nn.Module], None]
) -> Iterator[None]:
    """Call `announce(module)` before each module's own initialisation."""
    owners = [module for module in model.modules() if isinstance(module, PreTrainedModel)]

    def announced(original: Callable[[nn.Module], None]) -> Callable[[nn.Module], None]:
        def init_weights(module: nn.Module) -> None:
            announce(module)
            original(module)

        return init_weights

    for owner in owners:
        vars(owner)["_init_weights"] = announced(owner._init_weights)
    try:
        yield
    finally:
        for owner in owners:
            del vars(owner)["_init_weights"]


def _copy_constructed(model: PreTrainedModel, names: set[str], *, seed: int) -> None:
    """Fill what `_init_weights` leaves to the constructor from an ordinary build on the host.

    Its draws come in one stream, keyed by the seed alone: the constructor knows no names.
    """
    host = torch.device("cpu")
    with keyed_generator(seed, "constructor", host), host:
        built = type(model)(copy.deepcopy(model.config))
    with torch.no_grad():
        for name in names:
            source = built.get_parameter_or_buffer(name)
            model.get_parameter_or_buffer(name).copy_(source)
