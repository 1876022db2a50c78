"""Initial weights for a model that holds parts of its parameters only.

The library's own initialisation runs over a second model that has no memory. What it writes to a
parameter is written to a whole tensor instead, one parameter at a time, of which this rank's part
is kept. So the weights are bit for bit those of `init.materialize`, however they are
divided, and no rank ever holds a whole model.
"""

import copy
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers import PreTrainedModel

from llm.models.build import biases
from llm.models.init import KeyedDraws, materialize, writes_in_place
from llm.models.options import ModelOptions

logger = logging.getLogger("llm.models")

_REPLACES = {"normal_", "uniform_", "zero_", "zeros_", "ones_", "fill_", "constant_", "copy_"}
"""Functions whose result does not depend on what was there."""

_META = torch.device("meta")

_OPERATORS = {"__setitem__", "__iadd__", "__isub__", "__imul__", "__idiv__", "__itruediv__"}
"""What Python calls for `weight[0] = 0`, `weight /= 2` ..."""


def fill_model(
    options: ModelOptions, model: PreTrainedModel, *, seed: int, device: torch.device
) -> None:
    """Give a model that was built on the meta device, and divided since, memory and weights.

    Every rank draws one parameter at a time and keeps its part: the weights are those that
    `build_model` gives an undivided model.

    Args:
        options: As for `build_model`.
        model: Changed in place.
        seed: As for `build_model`.
        device: Where the parts will live.
    """
    model_class, config = type(model), model.config

    def make_recipe() -> PreTrainedModel:
        with torch.device("meta"):
            recipe: PreTrainedModel = model_class(copy.deepcopy(config))
        return recipe

    init_shards(model, make_recipe, seed=seed, device=device)
    if options.no_bias:
        with torch.no_grad():
            for bias in biases(model):
                bias.zero_()


def init_shards(
    model: PreTrainedModel,
    make_recipe: Callable[[], PreTrainedModel],
    *,
    seed: int,
    device: torch.device,
) -> None:
    """Give a divided model on the meta device memory for its parts, and its initial weights.

    A model whose initialisation reads the weights that it has written, or that leaves some to its
    constructor, is drawn as a whole and then cut, with a warning.

    Args:
        model: Has no memory yet; changed in place. Every rank that holds parts of it must call
            this. It may lack modules of the recipe, and its vocabulary may have more rows: these
            become zero.
        make_recipe: Makes an undivided model of the same configuration on the meta device.
        seed: The run's seed.
        device: Where parameters and buffers will live.
    """
    _take_memory(model, device)
    recipe = make_recipe()
    _untie(recipe)
    try:
        ShardedDraws(recipe, model, seed=seed).run(device)
    except _NeedsWholeModelError as reason:
        logger.warning(
            f"Each rank draws the whole {type(model).__name__} and then keeps its part, which "
            f"takes the memory of all weights for a moment: {reason}"
        )
        whole = make_recipe()
        materialize(whole, seed=seed, device=device)
        own = _tensors(model)
        for name, tensor in [*whole.named_parameters(), *whole.named_buffers()]:
            if name in own:
                _keep_part(own[name], tensor.detach())


def _take_memory(model: nn.Module, device: torch.device) -> None:
    """Leave the meta device; what was tied before is tied afterwards."""
    names: dict[Tensor, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            names.setdefault(parameter, []).append((module, name))
    model.to_empty(device=device)
    for (owner, first), *others in names.values():
        for module, name in others:
            module.register_parameter(name, owner.get_parameter(first))


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name, tied ones by each of their names."""
    parameters = model.named_parameters(remove_duplicate=False)
    buffers = model.named_buffers(remove_duplicate=False)
    return {name: tensor.detach() for name, tensor in [*parameters, *buffers]}


class _NeedsWholeModelError(Exception):
    """Why an initialisation cannot go parameter by parameter."""


class ShardedDraws(KeyedDraws):
    """Does to a whole tensor what is meant for a parameter without memory, and keeps its part.

    The whole tensor lives until another parameter is written to. For one that is changed later
    once more, it is gathered from all ranks. What is meant for a parameter that the model lacks
    is left undone.

    Args:
        recipe: An undivided model on the meta device, which is initialised.
        model: What its weights go to.
        seed: The run's seed.
    """

    def __init__(self, recipe: PreTrainedModel, model: PreTrainedModel, *, seed: int) -> None:
        super().__init__(recipe, seed)
        self._parts = _tensors(model)
        self._device = _META
        self._held: tuple[str, Tensor] | None = None

    def run(self, device: torch.device) -> None:
        """Fill the model; raises `_NeedsWholeModelError` where that needs a whole one."""
        self._device = device
        try:
            super().run(device)
        except RuntimeError as error:
            if "meta" not in str(error):
                raise
            # That is how torch says that a tensor without memory was read.
            raise _NeedsWholeModelError(str(error)) from error
        self._keep()
        own = self.names.intersection(self._parts)
        unwritten = own - self.written - set(self._model.all_tied_weights_keys)
        if unwritten:
            raise _NeedsWholeModelError(f"the constructor fills {', '.join(sorted(unwritten))}.")

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("device") == _META:
            # Something is computed where a weight lies, in order to be copied to it.
            kwargs["device"] = self._device
        keyword = next((word for word in ("tensor", "out") if word in kwargs), None)
        target: Any = kwargs[keyword] if keyword else args[0] if args else None
        name = self.name_of(target)
        draws, verb = writes_in_place(func), getattr(func, "__name__", "")
        changes = draws or keyword == "out" or verb in _OPERATORS
        if name is None or not changes:
            return func(*args, **kwargs)
        others = [value for value in (*args, *kwargs.values()) if value is not target]
        if any(isinstance(value, Tensor) and value.is_meta for value in others):
            raise _NeedsWholeModelError(f"{name} depends on other weights.")
        if name not in self._parts:
            return target
        whole = self._hold(name, like=target, anew=verb in _REPLACES)
        part = whole.as_strided(target.size(), target.stride(), target.storage_offset())
        if draws:
            self.seed_draw(name, target)
        if keyword:
            kwargs[keyword] = part
            func(*args, **kwargs)
        else:
            func(part, *args[1:], **kwargs)
        return target

    def _hold(self, name: str, *, like: Tensor, anew: bool) -> Tensor:
        """The whole of a parameter, with what was written to it so far.

        Args:
            name: The parameter's.
            like: What is about to be written to.
            anew: Whether that replaces all values there.
        """
        if self._held is not None and self._held[0] == name:
            return self._held[1]
        self._keep()
        recipe = self._model.get_parameter_or_buffer(name)
        target = self._parts[name]
        if not isinstance(target, DTensor) and target.shape == recipe.shape:
            whole: Tensor = target
        elif name not in self.written or (anew and like.numel() == recipe.numel()):
            whole = torch.empty(recipe.shape, dtype=recipe.dtype, device=self._device)
        else:
            gathered: Tensor = target.full_tensor() if isinstance(target, DTensor) else target
            whole = gathered[: len(recipe)]
        self._held = name, whole
        return whole

    def _keep(self) -> None:
        if self._held is not None:
            name, whole = self._held
            self._held = None
            _keep_part(self._parts[name], whole)


def _keep_part(target: Tensor, whole: Tensor) -> None:
    """Copy to a tensor what it holds of a whole one; rows that that one lacks become zero."""
    part, offsets = target, (0,) * target.ndim
    if isinstance(target, DTensor):
        part = target.to_local()
        _, offsets = compute_local_shape_and_global_offset(
            target.shape, target.device_mesh, target.placements
        )
    if target.shape != whole.shape:
        part.zero_()
    if part.numel() == 0:
        return
    own = whole[tuple(slice(o, o + n) for o, n in zip(offsets, part.shape, strict=True))]
    part[tuple(slice(n) for n in own.shape)].copy_(own)


def _untie(recipe: PreTrainedModel) -> None:
    """Keep what will be tied to another weight from being drawn, as when weights are loaded."""
    for name in recipe.all_tied_weights_keys:
        owner, _, leaf = name.rpartition(".")
        apart = nn.Parameter(torch.empty_like(recipe.get_parameter(name)))
        apart._is_hf_initialized = True  # type: ignore[attr-defined]
        setattr(recipe.get_submodule(owner), leaf, apart)
