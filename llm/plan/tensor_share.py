"""One rank's share of a model under tensor parallelism, as ordinary modules of smaller shapes."""

from typing import Any

from torch import nn
from transformers import PreTrainedModel

from llm.parallel.tensor_plans import check_tensor_parallel, tensor_plan

_COLUMNS = ("colwise", "conv1d_colwise", "conv1d_heads", "colwise_gather_output")
_ROWS = ("rowwise", "conv1d_rowwise", "rowwise_split_input")


def split_model(model: PreTrainedModel, tensor: int) -> None:
    """Give the modules of a model on the meta device the shapes that the fullest rank has.

    Args:
        model: Changed in place, by the plan that the trainer divides it by.
        tensor: Ranks that compute each layer together.

    Raises:
        ConfigError: The trainer does not divide such a model, or not over so many ranks.
    """
    if tensor == 1:
        return
    check_tensor_parallel(model.config, tensor)
    plan = tensor_plan(model)
    modules = dict(model.named_modules())
    for name, style in plan.styles.items():
        _split(modules[name], style, tensor)
    for name, attribute in plan.per_rank.items():
        setattr(modules[name], attribute, getattr(modules[name], attribute) // tensor)
    model.tie_weights()


def _split(module: Any, style: str, tensor: int) -> None:
    if style == "embedding_rowwise":
        module.weight = _narrowed(module.weight, 0, tensor)
    elif style in (*_COLUMNS, *_ROWS):
        is_conv1d = type(module).__name__ == "Conv1D"  # [inputs, outputs]
        module.weight = _narrowed(module.weight, int((style in _COLUMNS) == is_conv1d), tensor)
        if style in _COLUMNS and isinstance(module.bias, nn.Parameter):
            module.bias = _narrowed(module.bias, 0, tensor)
        if style in _COLUMNS and is_conv1d:
            module.nf = module.weight.shape[1]


def _narrowed(parameter: nn.Parameter, dim: int, tensor: int) -> nn.Parameter:
    size = -(-parameter.shape[dim] // tensor)
    part = parameter.detach().narrow(dim, 0, size).clone()
    return nn.Parameter(part, requires_grad=parameter.requires_grad)
