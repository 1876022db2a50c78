"""Layers whose products several ranks compute together (tensor parallelism).

A rank multiplies with some columns of one matrix, the heads of an attention among them, and with
the same rows of the next; one sum over the ranks follows. See Shoeybi et al. 2019,
arXiv:1909.08053. The styles are those of transformers, and ours where it has none that is exact;
every weight that is divided is a DTensor of the whole one's name and shape, in one piece per rank.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from transformers import PreTrainedModel
from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES

from llm.parallel.tp_rng import OwnRandomness, has_attention_dropout

_FUSED = 3  # query, key and value lie side by side in GPT-2's columns
_SPLITTING = ("colwise", "conv1d_heads")
_JOINING = ("rowwise", "conv1d_rowwise")


def divide_layers(
    model: PreTrainedModel,
    mesh: DeviceMesh,
    *,
    styles: Mapping[str, str],
    per_rank: Mapping[str, str],
) -> None:
    """Leave of each layer what this rank computes; every rank of the mesh must call it.

    Args:
        model: A causal language model, the same on all ranks, on the meta device too; changed in
            place.
        mesh: The ranks that compute each layer together, one axis.
        styles: By module name: a style of transformers, or one of ours (conv1d_colwise,
            conv1d_rowwise, conv1d_heads).
        per_rank: Attributes to divide by the number of ranks, by module name.
    """
    for name, style in styles.items():
        module = model.get_submodule(name)
        if style in _OURS:
            _OURS[style](module, mesh)
            continue
        layer = ALL_PARALLEL_STYLES[style]
        for parameter, _ in list(module.named_parameters(recurse=False)):
            layer.shard_param(module, parameter, mesh)
        layer.install_forward(module, mesh)
    if has_attention_dropout(model.config.to_dict()):
        _draw_own_masks(model, mesh, styles)
    for name, attribute in per_rank.items():
        module = model.get_submodule(name)
        setattr(module, attribute, getattr(module, attribute) // mesh.size())
    model.tie_weights()


def _draw_own_masks(model: nn.Module, mesh: DeviceMesh, styles: Mapping[str, str]) -> None:
    """Give each rank's attention heads dropout masks of their own."""
    own = OwnRandomness(_device_of(mesh), mesh.get_local_rank())
    for name, style in styles.items():
        if "att" in name and style in _SPLITTING:
            own.begin_after(model.get_submodule(name))
        elif "att" in name and style in _JOINING:
            own.end_before(model.get_submodule(name))


def _device_of(mesh: DeviceMesh) -> torch.device:
    """This rank's device; the model may have none yet."""
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.accelerator.current_device_index())


def _conv1d_colwise(module: Any, mesh: DeviceMesh) -> None:
    """Split the outputs of a transposed linear layer."""
    _divide(module, mesh, weight=Shard(1), bias=Shard(0))

    def forward(inputs: Tensor) -> Tensor:
        weight, bias = module.weight.to_local(), module.bias.to_local()
        return F.linear(_copied(inputs, mesh), weight.t(), bias)

    module.forward = forward


def _conv1d_rowwise(module: Any, mesh: DeviceMesh) -> None:
    """Split the inputs of a transposed linear layer; they come split."""
    _divide(module, mesh, weight=Shard(0))

    def forward(inputs: Tensor) -> Tensor:
        product = F.linear(inputs, module.weight.to_local().t())
        total: Tensor = _summed(product, mesh) + module.bias
        return total

    module.forward = forward


def _conv1d_heads(module: Any, mesh: DeviceMesh) -> None:
    """Split query, key and value of a transposed linear layer by heads.

    A rank's columns lie in three places of the matrix, which no checkpoint could name as one. So
    it keeps some of the rows, and the ranks swap these for columns where they are needed.
    """
    _divide(module, mesh, weight=Shard(0))
    parts = (_FUSED, mesh.size(), -1)

    def forward(inputs: Tensor) -> Tensor:
        rows = module.weight.unflatten(1, parts)
        columns = rows.redistribute(placements=[Shard(2)]).to_local().flatten(1)
        bias = _copied(module.bias, mesh).unflatten(0, parts)[:, mesh.get_local_rank()].flatten()
        return F.linear(_copied(inputs, mesh), columns.t(), bias)

    module.forward = forward


def _on_split_inputs(module: nn.Module, mesh: DeviceMesh) -> None:
    """Let a layer that all ranks hold, and each applies to its own heads, have one gradient.

    transformers' style of this name sums what has been accumulated so far, each time anew.
    """
    whole = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        own = {name: p for name, p in module._parameters.items() if p is not None}
        copies: Any = {name: _copied(parameter, mesh) for name, parameter in own.items()}
        module._parameters.update(copies)
        try:
            return whole(*args, **kwargs)
        finally:
            module._parameters.update(own)

    module.forward = forward


_OURS: dict[str, Callable[[Any, DeviceMesh], None]] = {
    "conv1d_colwise": _conv1d_colwise,
    "conv1d_rowwise": _conv1d_rowwise,
    "conv1d_heads": _conv1d_heads,
    "replicated_with_grad_allreduce": _on_split_inputs,
}


def _divide(module: nn.Module, mesh: DeviceMesh, **placements: Shard) -> None:
    for name, placement in placements.items():
        whole = module.get_parameter(name)
        part = distribute_tensor(whole.detach(), mesh, [placement], src_data_rank=None)
        module.register_parameter(name, nn.Parameter(part, requires_grad=whole.requires_grad))


def _copied(tensor: Tensor, mesh: DeviceMesh) -> Tensor:
    """The same tensor, whose gradient is the sum of those of all ranks."""
    whole = DTensor.from_local(tensor, mesh, [Replicate()], run_check=False)
    copied: Tensor = whole.to_local(grad_placements=[Partial()])
    return copied


def _summed(tensor: Tensor, mesh: DeviceMesh) -> Tensor:
    """The sum of all ranks' tensors; its gradient is theirs."""
    terms = DTensor.from_local(tensor, mesh, [Partial()], run_check=False)
    total: Tensor = terms.redistribute(placements=[Replicate()]).to_local()
    return total
