"""Linear layers that multiply in float8, and their weights in messages between ranks."""

import contextlib
import functools
import logging
from collections.abc import Iterator

import torch
from accelerate.utils.ao import (
    convert_model_to_fp8_ao,
    filter_linear_layers,
    find_first_last_linear_layers,
)
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from llm.errors import ParallelError
from llm.models.patches.routers import float32_routers

logger = logging.getLogger("llm.parallel")


def convert_to_fp8(model: nn.Module, *, all_gather: bool) -> None:
    """Let the linear layers of a model multiply in float8, except the first and the last one.

    Routers in float32 do not change. Accelerate converts a model in its `prepare` only, which would
    shard and wrap it too. Weights stay float32 and keep their names.

    Args:
        model: Not yet sharded nor wrapped; changed in place.
        all_gather: Whether `fully_shard` gathers the weights of these layers in float8.

    Raises:
        ParallelError: It has no layer to convert.
    """
    from torchao.float8 import Float8LinearConfig

    original_types = {type(module) for module in model.modules()}
    # Padded, because the float8 product needs multiples of 16, also for tokens.
    config = Float8LinearConfig(pad_inner_dim=True, enable_fsdp_float8_all_gather=all_gather)
    router_modules = {module for router in float32_routers(model) for module in router.modules()}
    router_layer_names = [
        name for name, module in model.named_modules() if module in router_modules
    ]
    # The filter of Accelerate before 1.15 that it names as its default fails on every model.
    should_convert = functools.partial(
        filter_linear_layers,
        layers_to_filter=[*find_first_last_linear_layers(model), *router_layer_names],
    )
    convert_model_to_fp8_ao(model, config=config, module_filter_func=should_convert)
    num_converted = sum(type(module) not in original_types for module in model.modules())
    if not num_converted:
        raise ParallelError(
            "--mixed_precision fp8 changes linear layers with sizes that are multiples of 16, and "
            "this model has none (GPT-2's have another type); use bf16."
        )
    logger.info(f"{num_converted} linear layers multiply in float8, the rest in bf16.")


@contextlib.contextmanager
def precomputed_float8_scales(model: nn.Module) -> Iterator[None]:
    """Compute the scales of all weights gathered in float8, in one all-reduce.

    Outside of the context each gather computes its scale, with an all-reduce per weight. A scale
    therefore never outlives the weights that it was computed from.

    Args:
        model: Sharded, with weights that do not change inside the context. All ranks must enter it.
    """
    from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

    precompute_float8_dynamic_scale_for_fsdp(model)
    with torch.no_grad():  # so that `to_local` returns the tensor with the scale
        shards = [p.to_local() for p in model.parameters() if isinstance(p, DTensor)]
    try:
        yield
    finally:
        for shard in shards:
            if unwrap_float8_weight(shard) is not shard:
                shard._precomputed_scale = None  # type: ignore[attr-defined]


def unwrap_float8_weight(tensor: Tensor) -> Tensor:
    """Return the float32 tensor inside a weight that is gathered in float8, in the same memory.

    torchao wraps these weights to add a scale. Any other tensor is returned unchanged.
    """
    unwrapped: Tensor = getattr(tensor, "_tensor", tensor)
    return unwrapped
