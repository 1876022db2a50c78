"""Tensor parallelism: the matrix products of a layer are spread over ranks.

A rank multiplies by some columns of one matrix (for attention, of some heads) and by the same rows
of the next; an all-reduce of the products follows. See Shoeybi et al. 2019, arXiv:1909.08053. The
styles come from transformers, or are ours if transformers has none that is exact. Every sharded
weight is a DTensor with the name and shape of the whole one, contiguous on each rank.
"""

import functools
import hashlib
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor
from transformers import PreTrainedModel
from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES

from llm.errors import ConfigError
from llm.parallel.residual import ResidualStream
from llm.parallel.tensor_plans import TensorPlan, make_tensor_plan, sequence_plan

_NUM_FUSED_MATRICES = 3  # query, key and value, side by side in the columns of GPT-2
_COLUMN_STYLES = ("colwise", "conv1d_heads")
_ROW_STYLES = ("rowwise", "conv1d_rowwise")


def divide_layers(
    model: PreTrainedModel, mesh: DeviceMesh, *, sequence_parallel: bool = False
) -> None:
    """Keep the shard of each layer that this rank computes; every rank of the mesh must call it.

    Args:
        model: A causal language model that `check_tensor_parallel` accepts, equal on all ranks, on
            any device; changed in place.
        mesh: The ranks that compute each layer together, one axis.
        sequence_parallel: Whether each rank holds only some tokens between the layers, if
            `check_sequence_parallel` accepts the model.

    Raises:
        ConfigError: The model's plan leaves out a weight that must be sharded too.
    """
    plan = make_tensor_plan(model)
    stream = ResidualStream(mesh, sharded=sequence_parallel)
    patched_styles = _PATCHED_STYLES | _LINEAR_STYLES if sequence_parallel else _PATCHED_STYLES
    for name, style in plan.styles.items():
        module = model.get_submodule(name)
        if style in patched_styles:
            patched_styles[style](module, mesh, stream)
        else:
            _apply_library_style(ALL_PARALLEL_STYLES[style], module, mesh)
    if sequence_parallel:
        _shard_residual_stream(model, stream, mesh)
    elif _find_dropout_fields(model, "att"):
        _separate_attention_dropout(model, plan, mesh)
    for name, attribute in plan.divided_attributes.items():
        module = model.get_submodule(name)
        setattr(module, attribute, getattr(module, attribute) // mesh.size())
    model.tie_weights()


def _separate_attention_dropout(model: PreTrainedModel, plan: TensorPlan, mesh: DeviceMesh) -> None:
    """Let each rank draw a separate dropout mask for the attention of its heads."""
    rng = TensorParallelRNG(_device_of(mesh), mesh.get_local_rank())
    for name, style in plan.styles.items():
        if "att" in name and style in _COLUMN_STYLES:
            model.get_submodule(name).register_forward_hook(rng.use_rank_state)
        elif "att" in name and style in _ROW_STYLES:
            model.get_submodule(name).register_forward_pre_hook(rng.use_shared_state)


def _apply_library_style(style: Any, module: nn.Module, mesh: DeviceMesh) -> None:
    """Shard the parameters of a layer, and change its forward, by a style of transformers."""
    for name, _ in list(module.named_parameters(recurse=False)):
        style.shard_param(module, name, mesh)
    style.install_forward(module, mesh)


def check_compiled_dropout(model: PreTrainedModel, *, sequence_parallel: bool) -> None:
    """Refuse to compile blocks in which each rank has to draw a different dropout mask.

    A compiled graph draws from the generator that the ranks share.

    Raises:
        ConfigError: Ranks would drop the same units of different heads or tokens.
    """
    names = _find_dropout_fields(model, "" if sequence_parallel else "att")
    if names:
        option = "--sequence_parallel" if sequence_parallel else "--tensor_parallel_size"
        raise ConfigError(
            f"--torch_compile with {option} would drop the same units on every rank: set "
            f"--no_torch_compile, or --config_overrides {','.join(f'{name}=0' for name in names)}."
        )


def _find_dropout_fields(model: PreTrainedModel, name_part: str = "") -> list[str]:
    """Return the configuration's fields that turn on dropout, with this part in their names."""
    fields = model.config.to_dict().items()
    other_task_prefixes = ("summary", "classifier")
    return [
        name
        for name, probability in fields
        if "drop" in name
        and name_part in name
        and probability
        and not name.startswith(other_task_prefixes)
    ]


def _shard_residual_stream(
    model: PreTrainedModel, stream: ResidualStream, mesh: DeviceMesh
) -> None:
    """Compute norms, residual additions and dropouts on this rank's tokens only."""
    plan = sequence_plan(model)
    input_module, last_norm = model.get_submodule(plan.start), model.get_submodule(plan.last_norm)
    if _find_dropout_fields(model):
        rng = TensorParallelRNG(_device_of(mesh), mesh.get_local_rank())
        input_module.register_forward_pre_hook(rng.use_rank_state)
        last_norm.register_forward_pre_hook(rng.use_shared_state)
    _shard_input(input_module, stream)
    for name in plan.norms:
        _gather_output(model.get_submodule(name), stream, for_layer=True)
    _gather_output(last_norm, stream, for_layer=False)


def find_partial_gradients(model: PreTrainedModel) -> list[str]:
    """Return the parameters with gradients of a rank's tokens only, if the stream is sharded.

    Args:
        model: A model that `divide_layers` has changed.

    Returns:
        Names of the weights of norms, and of the biases that are added to the residual stream.
    """
    norm_plan, layer_plan = sequence_plan(model), make_tensor_plan(model)
    row_modules = {name for name, style in layer_plan.styles.items() if style in _ROW_STYLES}
    norm_modules = {*norm_plan.norms, norm_plan.last_norm}
    names = []
    for name, parameter in model.named_parameters():
        module_name, _, parameter_name = name.rpartition(".")
        is_added_bias = module_name in row_modules and "bias" in parameter_name
        if parameter.requires_grad and (module_name in norm_modules or is_added_bias):
            names.append(name)
    return names


def _shard_input(module: Any, stream: ResidualStream) -> None:
    """Let a module compute on this rank's tokens of its input."""
    original_forward = module.forward

    def forward(hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        return original_forward(stream.shard(hidden), *args, **kwargs)

    module.forward = forward


def _gather_output(module: Any, stream: ResidualStream, *, for_layer: bool) -> None:
    """Let a module return the tokens of all ranks."""
    original_forward = module.forward

    def forward(hidden: Tensor) -> Tensor:
        return stream.gather(original_forward(hidden), for_layer=for_layer)

    module.forward = forward


def _device_of(mesh: DeviceMesh) -> torch.device:
    """Return this rank's device; the model may still be on the meta device."""
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.accelerator.current_device_index())


def _shard_columns(
    module: Any, mesh: DeviceMesh, stream: ResidualStream, *, transposed: bool = False
) -> None:
    """Shard the outputs of a linear layer; the weight of a Conv1D is transposed."""
    bias_placement = {} if module.bias is None else {"bias": Shard(0)}
    _shard_parameters(module, mesh, weight=Shard(1 if transposed else 0), **bias_placement)

    def forward(inputs: Tensor) -> Tensor:
        weight = module.weight.to_local()
        bias = None if module.bias is None else module.bias.to_local()
        return F.linear(stream.read(inputs), weight.t() if transposed else weight, bias)

    module.forward = forward


def _shard_rows(
    module: Any, mesh: DeviceMesh, stream: ResidualStream, *, transposed: bool = False
) -> None:
    """Shard the inputs of a linear layer, which are sharded already; see `_shard_columns`."""
    _shard_parameters(module, mesh, weight=Shard(0 if transposed else 1))

    def forward(inputs: Tensor) -> Tensor:
        weight = module.weight.to_local()
        product = F.linear(inputs, weight.t() if transposed else weight)
        return stream.reduce(product, module.bias)

    module.forward = forward


def _shard_fused_heads(module: Any, mesh: DeviceMesh, stream: ResidualStream) -> None:
    """Shard query, key and value of a transposed linear layer by heads.

    A rank's columns are in three places of the matrix. A DTensor has no such placement and cannot
    be saved. The rank keeps some of the rows instead, and an all-to-all exchanges them for its
    columns in each forward.
    """
    _shard_parameters(module, mesh, weight=Shard(0))
    fused_shape = (_NUM_FUSED_MATRICES, mesh.size(), -1)

    def forward(inputs: Tensor) -> Tensor:
        rows = module.weight.unflatten(1, fused_shape)
        columns = rows.redistribute(placements=[Shard(2)]).to_local().flatten(1)
        bias = stream.copy(module.bias).unflatten(0, fused_shape)
        local_bias = bias[:, mesh.get_local_rank()].flatten()
        return F.linear(stream.read(inputs), columns.t(), local_bias)

    module.forward = forward


def _all_reduce_weight_gradients(
    module: nn.Module, mesh: DeviceMesh, stream: ResidualStream
) -> None:
    """All-reduce the gradient of a layer that each rank applies to its heads.

    The style of this name in transformers all-reduces the accumulated gradient in each backward,
    so that it counts earlier micro-batches several times.
    """
    original_forward = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        parameters = {name: p for name, p in module._parameters.items() if p is not None}
        copies: Any = {name: stream.copy(parameter) for name, parameter in parameters.items()}
        module._parameters.update(copies)
        try:
            return original_forward(*args, **kwargs)
        finally:
            module._parameters.update(parameters)

    module.forward = forward


_Style = Callable[[Any, DeviceMesh, ResidualStream], None]
_PATCHED_STYLES: dict[str, _Style] = {
    "conv1d_colwise": functools.partial(_shard_columns, transposed=True),
    "conv1d_rowwise": functools.partial(_shard_rows, transposed=True),
    "conv1d_heads": _shard_fused_heads,
    "replicated_with_grad_allreduce": _all_reduce_weight_gradients,
}
_LINEAR_STYLES: dict[str, _Style] = {"colwise": _shard_columns, "rowwise": _shard_rows}
"""For a sharded residual stream; the styles of transformers need it whole."""


def _shard_parameters(module: nn.Module, mesh: DeviceMesh, **placements: Shard) -> None:
    """Replace parameters of a module, by name, by this rank's shards of them."""
    for name, placement in placements.items():
        parameter = module.get_parameter(name)
        shard = distribute_tensor(parameter.detach(), mesh, [placement], src_data_rank=None)
        module.register_parameter(name, nn.Parameter(shard, requires_grad=parameter.requires_grad))


class TensorParallelRNG:
    """Draws random numbers that differ between ranks while they compute their own heads or tokens.

    Tensor-parallel ranks share a seed because replicated activations need one dropout mask. The
    attention probabilities of a rank's heads need separate masks, as do a rank's tokens under
    sequence parallelism. These depend only on the state of the shared generator, so recomputed
    activations get the same masks.

    Args:
        device: Device of the generator; an accelerator with its index.
        rank: Rank of this process among those that compute each layer together.
    """

    def __init__(self, device: torch.device, rank: int) -> None:
        self._device = device
        self._rank = rank
        self._seed: int | None = None
        self._shared_state: Tensor | None = None

    def use_rank_state(self, module: nn.Module, *_: Any) -> None:
        """Draw rank-specific numbers from here on, in training; a hook of a module.

        It seeds the generator from its shared state and the rank, and remembers the shared state.
        """
        # A graph that torch.compile traces has no generator to change.
        if not module.training or torch.compiler.is_compiling() or self._in_rank_state():
            return
        torch.rand((), device=self._device)  # so that no two layers start from the same state
        generator = self._default_generator()
        self._shared_state = generator.get_state()
        seed_bytes = self._shared_state.numpy().tobytes() + self._rank.to_bytes(8)
        self._seed = int.from_bytes(hashlib.sha256(seed_bytes).digest()[:8]) >> 1
        generator.manual_seed(self._seed)

    def use_shared_state(self, *_: Any) -> None:
        """Draw shared numbers again, if the generator has a rank's state; a hook of a module."""
        if not torch.compiler.is_compiling() and self._in_rank_state():
            assert self._shared_state is not None
            self._default_generator().set_state(self._shared_state)

    def _in_rank_state(self) -> bool:
        """Return whether the generator draws rank-specific numbers."""
        # The generator knows: recomputation may stop between the two hooks and restore its state.
        return bool(self._default_generator().initial_seed() == self._seed)

    def _default_generator(self) -> Any:
        if self._device.type == "cpu":
            return torch.default_generator
        return torch.get_device_module(self._device).default_generators[self._device.index]
