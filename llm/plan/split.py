"""One rank's share of a block under tensor parallelism, as ordinary modules of smaller shapes."""

import fnmatch
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from llm.errors import ConfigError

_GPT2_PLAN = {
    "h.*.attn.c_attn": "colwise",
    "h.*.attn.c_proj": "rowwise",
    "h.*.mlp.c_fc": "colwise",
    "h.*.mlp.c_proj": "rowwise",
}
_OWN_PLANS = {"gpt2": _GPT2_PLAN}


def tensor_plan(model: PreTrainedModel) -> dict[str, str]:
    """How a model's modules are split over tensor-parallel ranks, by pattern of their names.

    Only modules of blocks are named: embedding and output head are held whole by every rank.

    Raises:
        ConfigError: Neither the library nor this package has a plan for the architecture.
    """
    config = model.config
    plan = _OWN_PLANS.get(config.model_type) or config.base_model_tp_plan
    if not plan:
        raise ConfigError(
            f"--tensor_parallel_size: there is no plan to split a {config.model_type} model; leave "
            "it at 1, and divide the weights with --data_parallel_shard_size."
        )
    return {name: style for name, style in plan.items() if style in ("colwise", "rowwise")}


def check_heads(model: PreTrainedModel, tensor: int) -> None:
    """Refuse a split that cuts through heads.

    Raises:
        ConfigError: The heads, of queries or of keys and values, cannot be divided.
    """
    config = model.config.get_text_config()
    heads = config.num_attention_heads
    for number in (heads, getattr(config, "num_key_value_heads", None) or heads):
        if number % tensor:
            raise ConfigError(
                f"--tensor_parallel_size {tensor} does not divide the {number} heads of the model; "
                "choose a divisor of it."
            )


def split_model(model: PreTrainedModel, tensor: int) -> None:
    """Give the modules of a model on the meta device the shapes that one rank has.

    Raises:
        ConfigError: There is no plan, or a width cannot be divided.
    """
    if tensor == 1:
        return
    check_heads(model, tensor)
    plan = tensor_plan(model)
    for name, module in model.base_model.named_modules():
        style = next((s for pattern, s in plan.items() if fnmatch.fnmatch(name, pattern)), None)
        if style is not None:
            _split(module, style, tensor, name=name)
        if type(module).__name__ == "GPT2Attention":
            module.num_heads //= tensor
            module.split_size //= tensor


def _split(module: Any, style: str, tensor: int, *, name: str) -> None:
    weight = module.weight
    transposed = type(module).__name__ == "Conv1D"  # [inputs, outputs]
    dim = int((style == "colwise") == transposed)
    if weight.shape[dim] % tensor:
        raise ConfigError(
            f"--tensor_parallel_size {tensor} does not divide the {weight.shape[dim]} columns of "
            f"{name}; choose a divisor of it."
        )
    module.weight = _narrowed(weight, dim, tensor)
    if style == "colwise" and isinstance(module.bias, nn.Parameter):
        module.bias = _narrowed(module.bias, 0, tensor)
    if transposed and style == "colwise":
        module.nf //= tensor


def _narrowed(parameter: nn.Parameter, dim: int, tensor: int) -> nn.Parameter:
    part = parameter.detach().narrow(dim, 0, parameter.shape[dim] // tensor).clone()
    return nn.Parameter(part, requires_grad=parameter.requires_grad)
