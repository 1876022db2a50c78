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
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from llm.runtime.rng import seed_torch


def derive_seed(seed: int, name: str) -> int:
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
        seed_torch(derive_seed(seed, name))
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
    tied_names = set(model.all_tied_weights_keys)
    for name in tied_names:
        # As when loading, transformers skips weights that will be tied to another one.
        model.get_parameter(name)._is_hf_initialized = True
    draws = KeyedDraws(model, seed)
    draws.initialize(device)
    constructor_names = draws.tensor_names - draws.written_names - tied_names
    if constructor_names:
        _copy_constructor_values(model, constructor_names, seed=seed)
    model.tie_weights()


class KeyedDraws(TorchFunctionMode):
    """Seeds the generator from the name of a parameter before anything writes to the parameter.

    Some draws do not fill a parameter directly (Mamba computes a bias from `torch.rand`), so each
    module's name seeds the generator before the module is initialized.

    Args:
        model: The model to initialize.
        seed: The run's seed.

    Attributes:
        tensor_names: Names of all parameters and buffers.
        written_names: Names of those that were written to.
    """

    def __init__(self, model: PreTrainedModel, seed: int) -> None:
        super().__init__()
        named_tensors = itertools.chain(model.named_parameters(), model.named_buffers())
        # Compared by identity, because tensors on the meta device have no address.
        self._name_by_storage = {
            tensor.untyped_storage()._cdata: name for name, tensor in named_tensors
        }
        self._name_by_module = {module: name for name, module in model.named_modules()}
        self._model = model
        self._seed = seed
        self.tensor_names = set(self._name_by_storage.values())
        self.written_names: set[str] = set()

    def initialize(self, device: torch.device) -> None:
        """Run the model's initialization by transformers.

        Args:
            device: Device of the generator.
        """
        pretrained_modules = [m for m in self._model.modules() if isinstance(m, PreTrainedModel)]
        for module in pretrained_modules:
            # An attribute of the object hides the class's method.
            vars(module)["_init_weights"] = functools.partial(
                self._seed_and_init, module._init_weights
            )
        try:
            with keyed_generator(self._seed, "model", device), self:
                self._model.initialize_weights()
        finally:
            for module in pretrained_modules:
                del vars(module)["_init_weights"]

    def _seed_and_init(self, init_weights: Callable[[nn.Module], None], module: nn.Module) -> None:
        """Seed the generator from a module's name, then run transformers' initialization of it."""
        seed_torch(derive_seed(self._seed, self._name_by_module[module]))
        init_weights(module)

    def tensor_name(self, tensor: Any) -> str | None:
        """Return the name of the parameter or buffer that a tensor is, or is a view of."""
        if not isinstance(tensor, torch.Tensor):
            return None
        return self._name_by_storage.get(tensor.untyped_storage()._cdata)

    def seed_draw(self, name: str, target: torch.Tensor) -> None:
        """Seed the generator for a write to a parameter, or to a slice of it."""
        self.written_names.add(name)
        # Two slices of a parameter must not get the same numbers.
        seed_torch(derive_seed(self._seed, f"{name}/{target.storage_offset()}"))

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Seed the generator before a function that writes to a parameter."""
        kwargs = kwargs or {}
        # Functions of torch.nn.init arrive here too, with the tensor as a keyword argument.
        target: Any = kwargs.get("tensor", args[0] if args else None)
        name = self.tensor_name(target)
        if name is not None and writes_in_place(func):
            self.seed_draw(name, target)
        return func(*args, **kwargs)


def writes_in_place(func: Any) -> bool:
    """Return whether a function works in place, judged by its name: `normal_`, `copy_` ..."""
    name = getattr(func, "__name__", "")
    return name.endswith("_") and not name.endswith("__")


def _copy_constructor_values(model: PreTrainedModel, tensor_names: set[str], *, seed: int) -> None:
    """Copy the values that only a model's constructor sets, from a second model on the host.

    Its random numbers depend on the seed alone, not on the parameters' names.
    """
    host = torch.device("cpu")
    with keyed_generator(seed, "constructor", host), host:
        constructed_model = type(model)(copy.deepcopy(model.config))
    with torch.no_grad():
        for name in tensor_names:
            constructed_tensor = constructed_model.get_parameter_or_buffer(name)
            model.get_parameter_or_buffer(name).copy_(constructed_tensor)


def copy_to_meta(model: PreTrainedModel) -> PreTrainedModel:
    """Return a copy on the meta device with the same names and shapes, which takes no memory."""
    named_tensors = itertools.chain(model.named_parameters(), model.named_buffers())
    meta_tensor_by_id: dict[int, Any] = {}
    for _, tensor in named_tensors:
        meta_tensor = tensor.detach().to("meta")
        if isinstance(tensor, nn.Parameter):
            meta_tensor = nn.Parameter(meta_tensor, requires_grad=tensor.requires_grad)
        meta_tensor_by_id[id(tensor)] = meta_tensor
    # deepcopy finds these tensors in its memo, so tied weights stay tied.
    return copy.deepcopy(model, meta_tensor_by_id)


@contextmanager
def dummy_weights(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Give the meta tensors of a model dummy values inside the context; restore them afterwards.

    Entry (i, j) of a matrix is entry i + j of one row of random numbers, so a matrix needs only
    the memory of one row and one column. A stack of matrices, such as a layer's experts, repeats
    one contiguous matrix, because kernels for stacks need this. Stacks with matrices of one shape
    share it. All ranks draw the same numbers.

    Args:
        model: A model, or a module that contains one; tied parameters stay tied.
        device: Where the model computes inside the context.
    """
    dummy_values = _DummyValues(device)
    dummy_by_tensor: dict[Tensor, Tensor] = {}  # one for all names of a tied parameter
    tensor_slots = _find_meta_tensors(model)
    try:
        for slot in tensor_slots:
            if slot.tensor not in dummy_by_tensor:
                dummy_by_tensor[slot.tensor] = dummy_values.make_values(slot.tensor)
            slot.module_tensors[slot.name] = dummy_by_tensor[slot.tensor]
        yield
    finally:
        for slot in tensor_slots:
            slot.module_tensors[slot.name] = slot.tensor


class _TensorSlot(NamedTuple):
    """A parameter or buffer of a module: the module's dictionary, the key, and the tensor."""

    module_tensors: dict[str, Any]
    name: str
    tensor: Tensor


def _find_meta_tensors(model: nn.Module) -> list[_TensorSlot]:
    """Return all parameters and buffers on the meta device; tied ones once for each module."""
    tensor_slots = []
    for module in model.modules():
        tensor_dicts: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        for module_tensors in tensor_dicts:
            for name, tensor in module_tensors.items():
                if tensor is not None and tensor.is_meta:
                    tensor_slots.append(_TensorSlot(module_tensors, name, tensor))
    return tensor_slots


class _DummyValues:
    """Random numbers scaled so that a signal passes through many layers."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._generator = torch.Generator().manual_seed(0)
        self._matrices: dict[torch.Size, Tensor] = {}

    def make_values(self, tensor: Tensor) -> Tensor:
        """Return dummy values for a parameter or buffer on the meta device."""
        if not tensor.is_floating_point():  # an all-true mask, or indices of 0
            fill_value = tensor.dtype == torch.bool
            return tensor.new_full(tensor.shape, fill_value, device=self._device)
        if not isinstance(tensor, nn.Parameter):  # such as rotary frequencies
            row = torch.rand(sum(tensor.shape) + 1, generator=self._generator)
            return self._view_row_as(row, tensor)
        if tensor.ndim < 2:
            values = self._view_row_as(1 + 0.1 * self._draw_row(tensor.numel()), tensor)
        elif tensor.ndim == 2:
            row = self._draw_row(sum(tensor.shape)) / max(tensor.shape) ** 0.5
            values = self._view_row_as(row, tensor)
        else:
            matrix = self._get_shared_matrix(tensor.shape[-2:])
            values = matrix.to(tensor.dtype).expand(tensor.shape)
        return nn.Parameter(values, requires_grad=tensor.requires_grad)

    def _draw_row(self, length: int) -> Tensor:
        return torch.randn(length, generator=self._generator)

    def _view_row_as(self, row: Tensor, tensor: Tensor) -> Tensor:
        # Move to the device first: moving a view would make it contiguous.
        row = row.to(self._device, tensor.dtype)
        return row.as_strided(tensor.shape, (1,) * tensor.ndim)

    def _get_shared_matrix(self, shape: torch.Size) -> Tensor:
        if shape not in self._matrices:
            row = self._draw_row(sum(shape)) / max(shape) ** 0.5
            matrix = row.as_strided(shape, (1, 1)).contiguous()
            self._matrices[shape] = matrix.to(self._device)
        return self._matrices[shape]
