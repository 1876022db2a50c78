"""Weights for a model on the meta device: initial weights keyed by name, or dummies for checks.

Hugging Face's code initializes every module, in the library's order. Only the random numbers
change: the generator is seeded from (seed, name) before each write to a named parameter. A
parameter's initial value therefore does not depend on other layers, ranks or stages, and any rank
can draw it alone.

Dummy weights take almost no memory. They serve checks that do not depend on the weights, such as
whether pipeline stages compute the same as the whole model, or whether documents stay apart.
"""

import copy
import functools
import hashlib
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from llm.runtime.rng import seed_torch


def key(seed: int, name: str) -> int:
    """Derive a generator seed from the run's seed and a name."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


@contextmanager
def keyed_generator(seed: int, name: str, device: torch.device) -> Iterator[None]:
    """Draw from a generator keyed by (seed, name); restore the caller's generators afterwards.

    Args:
        seed: The run's seed.
        name: Purpose of the draws.
        device: Device of the generator.
    """
    devices = [] if device.type in ("cpu", "meta") else [device]
    with torch.random.fork_rng(devices=devices, device_type=device.type if devices else "cuda"):
        seed_torch(key(seed, name))
        yield


def materialize(model: PreTrainedModel, *, seed: int, device: torch.device) -> None:
    """Allocate the memory of a model that was built on the meta device, and initialize it.

    Nothing is drawn or copied on the host when `device` is an accelerator.

    Args:
        model: A model on the meta device; changed in place.
        seed: The run's seed.
        device: Device of the parameters and buffers.
    """
    model.to_empty(device=device)
    for name in model.all_tied_weights_keys:
        # As when loading, transformers skips weights that will be tied to another one.
        model.get_parameter(name)._is_hf_initialized = True
    draws = KeyedDraws(model, seed)
    draws.run(device)
    unwritten = draws.names - draws.written - set(model.all_tied_weights_keys)
    if unwritten:
        _copy_constructed(model, unwritten, seed=seed)
    model.tie_weights()


class KeyedDraws(TorchFunctionMode):
    """Seeds the generator from the name of a parameter before anything writes to the parameter.

    Some draws do not fill a parameter directly (Mamba computes a bias from `torch.rand`), so each
    module's name seeds the generator before the module is initialized.

    Args:
        model: The model to initialize.
        seed: The run's seed.

    Attributes:
        names: All parameters and buffers.
        written: Names that were written to.
    """

    def __init__(self, model: PreTrainedModel, seed: int) -> None:
        super().__init__()
        tensors = itertools.chain(model.named_parameters(), model.named_buffers())
        # Compared by identity, because tensors on the meta device have no address.
        self._name_of = {tensor.untyped_storage()._cdata: name for name, tensor in tensors}
        self._model = model
        self._seed = seed
        self.names = set(self._name_of.values())
        self.written: set[str] = set()

    def run(self, device: torch.device) -> None:
        """Run the model's own initialization.

        Args:
            device: Device of the generator.
        """
        names = {module: name for name, module in self._model.named_modules()}
        owners = [m for m in self._model.modules() if isinstance(m, PreTrainedModel)]

        def seeded(init_weights: Callable[[nn.Module], None], module: nn.Module) -> None:
            seed_torch(key(self._seed, names[module]))
            init_weights(module)

        for owner in owners:
            # An attribute of the object hides the class's method.
            vars(owner)["_init_weights"] = functools.partial(seeded, owner._init_weights)
        try:
            with keyed_generator(self._seed, "model", device), self:
                self._model.initialize_weights()
        finally:
            for owner in owners:
                del vars(owner)["_init_weights"]

    def name_of(self, tensor: Any) -> str | None:
        """Return the name of the parameter or buffer that a tensor is, or is a view of."""
        if not isinstance(tensor, torch.Tensor):
            return None
        return self._name_of.get(tensor.untyped_storage()._cdata)

    def seed_draw(self, name: str, target: torch.Tensor) -> None:
        """Seed the generator for a write to a parameter, or to a slice of it."""
        self.written.add(name)
        # Two slices of a parameter must not get the same numbers.
        seed_torch(key(self._seed, f"{name}/{target.storage_offset()}"))

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        # Functions of torch.nn.init arrive here too, with the tensor as a keyword argument.
        target: Any = kwargs.get("tensor", args[0] if args else None)
        name = self.name_of(target)
        if name is not None and writes_in_place(func):
            self.seed_draw(name, target)
        return func(*args, **kwargs)


def writes_in_place(func: Any) -> bool:
    """Return whether a function works in place, judged by its name: `normal_`, `copy_` ..."""
    name = getattr(func, "__name__", "")
    return name.endswith("_") and not name.endswith("__")


def _copy_constructed(model: PreTrainedModel, names: set[str], *, seed: int) -> None:
    """Copy values that `_init_weights` does not set from an ordinary model on the host.

    The constructor draws from one stream, keyed by the seed alone.
    """
    host = torch.device("cpu")
    with keyed_generator(seed, "constructor", host), host:
        built = type(model)(copy.deepcopy(model.config))
    with torch.no_grad():
        for name in names:
            source = built.get_parameter_or_buffer(name)
            model.get_parameter_or_buffer(name).copy_(source)


def without_weights(model: PreTrainedModel) -> PreTrainedModel:
    """Copy a model to the meta device; the copy keeps sizes and names but takes no memory."""
    tensors = itertools.chain(model.named_parameters(), model.named_buffers())
    bare: dict[int, Any] = {}
    for _, tensor in tensors:
        meta = tensor.detach().to("meta")
        if isinstance(tensor, nn.Parameter):
            meta = nn.Parameter(meta, requires_grad=tensor.requires_grad)
        bare[id(tensor)] = meta
    # deepcopy reuses these memo entries, which keeps tied weights tied.
    return copy.deepcopy(model, bare)


@contextmanager
def dummy_weights(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Give the meta tensors of a model dummy values inside the context; restore them afterwards.

    Entry (i, j) of a matrix is number i + j of one row of random numbers, so a matrix needs only
    the memory of its two sides. A stack of matrices, such as a layer's experts, repeats one
    contiguous matrix, because kernels for stacks need this; layers share it. All ranks draw the
    same numbers.

    Args:
        model: A model, or a module that contains one; tied parameters stay tied.
        device: Where the model computes inside the context.
    """
    dummy = _DummyValues(device)
    values: dict[Tensor, Tensor] = {}
    places: list[tuple[dict[str, Any], str, Tensor]] = []
    for module in model.modules():
        tensor_dicts: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        for tensors in tensor_dicts:
            for name, tensor in tensors.items():
                if tensor is not None and tensor.is_meta:
                    if tensor not in values:
                        values[tensor] = dummy.of(tensor)
                    places.append((tensors, name, tensor))
    for tensors, name, tensor in places:
        tensors[name] = values[tensor]
    try:
        yield
    finally:
        for tensors, name, tensor in places:
            tensors[name] = tensor


class _DummyValues:
    """Random numbers scaled so that a signal passes through many layers."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._generator = torch.Generator().manual_seed(0)
        self._matrices: dict[torch.Size, Tensor] = {}

    def of(self, tensor: Tensor) -> Tensor:
        """Return values for a parameter or buffer."""
        if not tensor.is_floating_point():  # an all-true mask, or zero indices
            return tensor.new_full(tensor.shape, tensor.dtype == torch.bool, device=self._device)
        if not isinstance(tensor, nn.Parameter):  # rotary frequencies, for instance
            row = torch.rand(sum(tensor.shape) + 1, generator=self._generator)
            return self._spread_row(row, tensor)
        if tensor.ndim < 2:
            values = self._spread_row(1 + 0.1 * self._random_row(tensor.numel()), tensor)
        elif tensor.ndim == 2:
            row = self._random_row(sum(tensor.shape)) / max(tensor.shape) ** 0.5
            values = self._spread_row(row, tensor)
        else:
            values = self._dummy_matrix(tensor.shape[-2:]).to(tensor.dtype).expand(tensor.shape)
        return nn.Parameter(values, requires_grad=tensor.requires_grad)

    def _random_row(self, length: int) -> Tensor:
        return torch.randn(length, generator=self._generator)

    def _spread_row(self, row: Tensor, tensor: Tensor) -> Tensor:
        # Move to the device first: moving a view would make it contiguous.
        row = row.to(self._device, tensor.dtype)
        return row.as_strided(tensor.shape, (1,) * tensor.ndim)

    def _dummy_matrix(self, shape: torch.Size) -> Tensor:
        if shape not in self._matrices:
            row = self._random_row(sum(shape)) / max(shape) ** 0.5
            laid_out = row.as_strided(shape, (1, 1)).contiguous()
            self._matrices[shape] = laid_out.to(self._device)
        return self._matrices[shape]
