"""Initial or pretrained weights for a sharded model; each rank keeps its shards.

transformers initializes a second model, on the meta device. Each write to one of its
parameters goes to a whole tensor on the device instead, and this rank keeps its shard. So the
weights are bit-identical to `init.materialize` on every layout, and no rank ever holds a whole
model.

Each rank reads its shards of pretrained weights from safetensors, one file at a time.
"""

import copy
import logging
from collections.abc import Callable, Container, Sequence
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers import PreTrainedModel

from llm.models.build import find_biases
from llm.models.init import KeyedDraws, materialize, writes_in_place
from llm.models.options import ModelOptions
from llm.models.transforms import Transform
from llm.models.weight_files import WeightFile
from llm.parallel.float8 import unwrap_float8_weight

logger = logging.getLogger("llm.models")

_OVERWRITING_FUNCTIONS = {
    *("normal_", "uniform_", "zero_", "zeros_", "ones_", "fill_", "constant_", "copy_"),
}
"""Functions that overwrite a tensor without reading it."""

_META = torch.device("meta")

_IN_PLACE_OPERATORS = {
    *("__setitem__", "__iadd__", "__isub__", "__imul__", "__idiv__", "__itruediv__"),
}
"""The methods of statements that write to a tensor, such as `weight[0] = 0` and `weight /= 2`."""


def fill_model(
    options: ModelOptions,
    model: PreTrainedModel,
    *,
    seed: int,
    device: torch.device,
    files: Sequence[WeightFile] = (),
    transforms: Sequence[Transform] = (),
) -> None:
    """Allocate and fill a model that was built on the meta device and then sharded.

    The weights are those that `build_model` gives an unsharded model.

    Args:
        options: Options of the model.
        model: The sharded model; changed in place.
        seed: Seed of the run.
        device: Device of the shards.
        files: All files of the pretrained weights; empty to initialize the model.
        transforms: Changes to the initial weights, in their order.
    """

    def make_meta_model() -> PreTrainedModel:
        with _META:
            return type(model)(copy.deepcopy(model.config))

    loaded_names = {name for file in files for name in file.key_by_name}
    init_shards(model, make_meta_model, seed=seed, device=device, loaded_names=loaded_names)
    _load_shards(model, files)
    for transform in transforms:
        transform.change_initial_weights(model)
    if options.no_bias:
        with torch.no_grad():
            for bias in find_biases(model):
                bias.zero_()


def _load_shards(model: PreTrainedModel, files: Sequence[WeightFile]) -> None:
    """Copy this rank's shards of pretrained weights into a model, one file at a time."""
    target_by_name = _named_tensors(model)
    for file in files:
        with safe_open(file.path, framework="pt") as weights_file, torch.no_grad():
            for name in file.key_by_name.keys() & target_by_name.keys():
                _copy_shard(target_by_name[name], weights_file.get_slice(file.key_by_name[name]))


def init_shards(
    model: PreTrainedModel,
    make_meta_model: Callable[[], PreTrainedModel],
    *,
    seed: int,
    device: torch.device,
    loaded_names: Container[str] = (),
) -> None:
    """Allocate a sharded model on the meta device, and initialize its shards.

    A model is initialized as a whole and then sharded, with a warning, if its initialization reads
    weights that it has written, or leaves weights as its constructor has set them.

    Args:
        model: On the meta device; changed in place. Every rank that holds shards of it must call
            this. It may lack modules of the meta model, and its vocabulary may have more rows,
            which become zero.
        make_meta_model: Returns an unsharded model of the same configuration on the meta device.
        seed: The run's seed.
        device: Device of the parameters and buffers.
        loaded_names: Names of weights that keep their allocated contents.
    """
    _allocate_tensors(model, device)
    meta_model = make_meta_model()
    _exclude_tied_weights(meta_model)
    try:
        ShardedDraws(meta_model, model, seed=seed, loaded_names=loaded_names).initialize(device)
    except _NeedsWholeModelError as error:
        logger.warning(
            f"Each rank initializes the whole {type(model).__name__} and then keeps its shards, "
            f"which takes the memory of all weights for a moment: {error}"
        )
        full_model = make_meta_model()
        materialize(full_model, seed=seed, device=device)
        _copy_shards(full_model, model, loaded_names=loaded_names)


def _copy_shards(
    full_model: PreTrainedModel, model: PreTrainedModel, *, loaded_names: Container[str]
) -> None:
    """Copy this rank's shards of a whole model, except weights that are loaded from files."""
    target_by_name = _named_tensors(model)
    for name, tensor in [*full_model.named_parameters(), *full_model.named_buffers()]:
        if name in target_by_name and name not in loaded_names:
            _copy_shard(target_by_name[name], tensor.detach())


def _exclude_tied_weights(meta_model: PreTrainedModel) -> None:
    """Untie the weights that will be tied, and let transformers skip them, as when it loads."""
    for name in meta_model.all_tied_weights_keys:
        module_name, _, parameter_name = name.rpartition(".")
        untied_parameter = nn.Parameter(torch.empty_like(meta_model.get_parameter(name)))
        untied_parameter._is_hf_initialized = True  # type: ignore[attr-defined]
        setattr(meta_model.get_submodule(module_name), parameter_name, untied_parameter)


def _allocate_tensors(model: nn.Module, device: torch.device) -> None:
    """Allocate all tensors on a device; tied parameters stay tied, unlike with `to_empty`."""
    owners_by_parameter: dict[Tensor, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            owners_by_parameter.setdefault(parameter, []).append((module, name))
    model.to_empty(device=device)
    for (owner, owner_name), *aliases in owners_by_parameter.values():
        for module, name in aliases:
            module.register_parameter(name, owner.get_parameter(owner_name))


def _named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters and buffers by name; tied ones appear under each name."""
    parameters = model.named_parameters(remove_duplicate=False)
    buffers = model.named_buffers(remove_duplicate=False)
    return {name: tensor.detach() for name, tensor in [*parameters, *buffers]}


class _NeedsWholeModelError(Exception):
    """An initialization cannot run one parameter at a time."""


class _OpenTensor(NamedTuple):
    """The whole tensor of the parameter that the initialization is writing to."""

    name: str
    values: Tensor


class ShardedDraws(KeyedDraws):
    """Redirects writes to the meta model to whole tensors, and keeps the model's shards.

    A whole tensor is freed when another parameter is written to. If its parameter is written to
    once more, it is gathered from all ranks. Writes to a parameter that the model lacks are
    dropped.

    Args:
        meta_model: An unsharded model on the meta device; its initialization runs.
        model: Gets the weights.
        seed: The run's seed.
        loaded_names: Names of weights that the model does not receive.
    """

    def __init__(
        self,
        meta_model: PreTrainedModel,
        model: PreTrainedModel,
        *,
        seed: int,
        loaded_names: Container[str] = (),
    ) -> None:
        super().__init__(meta_model, seed)
        self._meta_model = meta_model
        self._target_by_name = {
            name: tensor
            for name, tensor in _named_tensors(model).items()
            if name not in loaded_names
        }
        self._device = _META  # until `initialize` sets the device of the whole tensors
        self._open_tensor: _OpenTensor | None = None

    def initialize(self, device: torch.device) -> None:
        """Initialize the model; raises `_NeedsWholeModelError` if this needs a whole model."""
        self._device = device
        try:
            super().initialize(device)
        except RuntimeError as error:
            if "meta" not in str(error):
                raise
            # torch raises this where a tensor on the meta device is read.
            raise _NeedsWholeModelError(str(error)) from error
        self._store_open_tensor()
        target_names = self.tensor_names.intersection(self._target_by_name)
        tied_names = set(self._meta_model.all_tied_weights_keys)
        if unwritten_names := sorted(target_names - self.written_names - tied_names):
            raise _NeedsWholeModelError(f"the constructor fills {', '.join(unwritten_names)}.")

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Send a write to a parameter of the meta model to the parameter's whole tensor."""
        kwargs = dict(kwargs or {})
        if kwargs.get("device") == _META:
            # Values that will be copied to a weight are computed on the device.
            kwargs["device"] = self._device
        keyword = next((keyword for keyword in ("tensor", "out") if keyword in kwargs), None)
        if keyword is not None:
            target: Any = kwargs[keyword]
        else:
            target = args[0] if args else None
        name = self.tensor_name(target)
        is_operator = getattr(func, "__name__", "") in _IN_PLACE_OPERATORS
        is_write = writes_in_place(func) or keyword == "out" or is_operator
        if name is None or not is_write:
            return func(*args, **kwargs)

        operands = [value for value in (*args, *kwargs.values()) if value is not target]
        if any(isinstance(value, Tensor) and value.is_meta for value in operands):
            raise _NeedsWholeModelError(f"{name} depends on other weights.")
        if name not in self._target_by_name:
            return target

        view = self._open_view(name, target, func)
        if writes_in_place(func):
            self.seed_draw(name, target)
        if keyword is not None:
            kwargs[keyword] = view
            func(*args, **kwargs)
        else:
            func(view, *args[1:], **kwargs)
        return target

    def _open_view(self, name: str, meta_view: Tensor, func: Any) -> Tensor:
        """Return the part of a whole parameter that a function writes to, such as a row.

        `meta_view` is the same part of the meta model's parameter, perhaps all of it.
        """
        is_whole = meta_view.numel() == self._meta_model.get_parameter_or_buffer(name).numel()
        function_name = getattr(func, "__name__", "")
        is_overwritten = is_whole and function_name in _OVERWRITING_FUNCTIONS
        full_tensor = self._open_full_tensor(name, is_overwritten=is_overwritten)
        return full_tensor.as_strided(
            meta_view.size(), meta_view.stride(), meta_view.storage_offset()
        )

    def _open_full_tensor(self, name: str, *, is_overwritten: bool) -> Tensor:
        """Return the whole of a parameter, with the values written to it so far.

        If the next write replaces all of them, none are needed.
        """
        if self._open_tensor is not None and self._open_tensor.name == name:
            return self._open_tensor.values
        self._store_open_tensor()
        needs_values = name in self.written_names and not is_overwritten
        full_tensor = self._gather_or_allocate(name, needs_values=needs_values)
        self._open_tensor = _OpenTensor(name, full_tensor)
        return full_tensor

    def _gather_or_allocate(self, name: str, *, needs_values: bool) -> Tensor:
        """Return a parameter's tensor if it is neither sharded nor padded, otherwise a full copy.

        The copy has the parameter's values if they are needed, and is empty otherwise.
        """
        meta_tensor = self._meta_model.get_parameter_or_buffer(name)
        target = self._target_by_name[name]
        if not isinstance(target, DTensor) and target.shape == meta_tensor.shape:
            return target
        if not needs_values:
            return torch.empty(meta_tensor.shape, dtype=meta_tensor.dtype, device=self._device)
        full_target: Tensor = target.full_tensor() if isinstance(target, DTensor) else target
        return full_target[: len(meta_tensor)]  # without padding of the vocabulary

    def _store_open_tensor(self) -> None:
        """Copy this rank's shard of the open tensor into the model, and free the tensor."""
        if self._open_tensor is not None:
            name, full_tensor = self._open_tensor
            self._open_tensor = None
            _copy_shard(self._target_by_name[name], full_tensor)


def _locate_shard(target: Tensor) -> tuple[Tensor, Sequence[int]]:
    """Return this rank's shard of a tensor, and its first index in each dimension."""
    if not isinstance(target, DTensor):
        return target, (0,) * target.ndim
    _, offsets = compute_local_shape_and_global_offset(
        target.shape, target.device_mesh, target.placements
    )
    return unwrap_float8_weight(target.to_local()), offsets


def _copy_shard(target: Tensor, full_tensor: Any) -> None:
    """Copy this rank's shard of a whole tensor; rows that the whole tensor lacks become zero.

    Args:
        target: A parameter or a buffer.
        full_tensor: A tensor, or one in a safetensors file; only the shard is read.
    """
    shape = full_tensor.shape if isinstance(full_tensor, Tensor) else full_tensor.get_shape()
    local_shard, offsets = _locate_shard(target)
    if list(target.shape) != list(shape):
        local_shard.zero_()
    # The shard may reach beyond the whole tensor, into padding.
    source_slices, filled_slices = [], []
    for offset, length, size in zip(offsets, local_shard.shape, shape, strict=True):
        start, end = min(offset, size), min(offset + length, size)
        source_slices.append(slice(start, end))
        filled_slices.append(slice(end - start))
    is_empty = any(filled_slice.stop == 0 for filled_slice in filled_slices)
    if not is_empty:
        source = full_tensor[tuple(source_slices) or ...]
        local_shard[tuple(filled_slices)].copy_(source)
