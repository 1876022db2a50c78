"""The model and the optimizer of one rank: tensor-parallel shapes, parameters, state."""

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

from llm.models.mixtures import find_experts
from llm.models.sizes import find_blocks
from llm.optim.run_optimizer import MatrixTraffic, StateMemory
from llm.parallel.tensor_plans import check_tensor_parallel, make_tensor_plan, sequence_plan
from llm.tools.plan.options import PlanOptions
from llm.trainers.gpt.seams import choose_factory, make_extensions

FP32, HALF, FP8 = 4, 2, 1
"""Bytes of a number in single and half precision, and in float8."""

_LAYER_COLUMNS = ("colwise", "conv1d_colwise", "conv1d_heads")
_COLUMNS = (*_LAYER_COLUMNS, "colwise_gather_output")
_ROWS = ("rowwise", "conv1d_rowwise", "rowwise_split_input")


def split_model(
    model: PreTrainedModel, tensor_size: int, *, sequence_parallel: bool = False
) -> None:
    """Give the modules of a model on the meta device the shapes of the fullest rank.

    Args:
        model: Changed in place, by the trainer's table of divisions.
        tensor_size: Size of tensor parallelism.
        sequence_parallel: Whether each rank holds only some tokens between the layers.

    Raises:
        ConfigError: The trainer cannot divide this model, or not over this number of ranks.
    """
    if tensor_size == 1:
        return
    check_tensor_parallel(model.config, tensor_size)
    plan = make_tensor_plan(model)
    modules = dict(model.named_modules())
    for name, style in plan.styles.items():
        _split_module(modules[name], style, tensor_size)
    for name, attribute in plan.divided_attributes.items():
        setattr(modules[name], attribute, getattr(modules[name], attribute) // tensor_size)
    if sequence_parallel:
        _split_residual_stream(model, tensor_size)
    model.tie_weights()


def count_columns(model: PreTrainedModel) -> int:
    """Return the number of matrices in layers that are divided by columns."""
    return sum(style in _LAYER_COLUMNS for style in make_tensor_plan(model).styles.values())


def _split_residual_stream(model: PreTrainedModel, tensor_size: int) -> None:
    """Let norms and residual additions see the tokens of one rank only, as in sequence parallelism.

    One process stands for all ranks: where ranks would gather, a rank's tensor is repeated, which
    takes the same memory.
    """
    plan, styles = sequence_plan(model), make_tensor_plan(model).styles
    hooks = _SequenceHooks(tensor_size)
    model.get_submodule(plan.start).register_forward_pre_hook(hooks.shard_inputs)
    for name in plan.norms:
        model.get_submodule(name).register_forward_hook(hooks.gather_in_autocast_dtype)
    model.get_submodule(plan.last_norm).register_forward_hook(hooks.gather)
    for name, style in styles.items():
        if style in _ROWS:
            model.get_submodule(name).register_forward_hook(hooks.scatter)


class _SequenceHooks:
    """Hooks of modules for sequence parallelism, which change the number of tokens.

    Args:
        tensor_size: Size of tensor parallelism.
    """

    def __init__(self, tensor_size: int) -> None:
        self._tensor_size = tensor_size
        # Recomputation frees the shard, but not the outputs of later blocks.
        self._hidden_shards: list[Tensor] = []

    def shard_inputs(self, _module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Give a module the tokens of one rank, and keep them until the backward pass."""
        hidden, *other_args = args
        hidden_shard = _rank_tokens(hidden, self._tensor_size)
        self._hidden_shards.append(hidden_shard)
        hidden_shard.register_hook(lambda _: self._hidden_shards.clear())
        return hidden_shard, *other_args

    def gather(self, _module: nn.Module, _args: Any, local: Tensor) -> Tensor:
        """Return the tokens of all ranks for the output of one rank."""
        return torch.cat([local] * self._tensor_size, dim=1)

    def gather_in_autocast_dtype(self, module: nn.Module, args: Any, local: Tensor) -> Tensor:
        """Return the same in the dtype of autocast, in which ranks send less."""
        if torch.is_autocast_enabled(local.device.type):
            local = local.to(torch.get_autocast_dtype(local.device.type))
        return self.gather(module, args, local)

    def scatter(self, _module: nn.Module, _args: Any, product: Tensor) -> Tensor:
        """Return the tokens of one rank."""
        return _rank_tokens(product, self._tensor_size)


def _rank_tokens(hidden: Tensor, tensor_size: int) -> Tensor:
    return hidden.narrow(1, 0, hidden.shape[1] // tensor_size).clone()


def _split_module(module: Any, style: str, tensor_size: int) -> None:
    """Narrow the weight and the bias of a module to a rank's part, by the style of its division."""
    if style == "embedding_rowwise":
        module.weight = _narrow_parameter(module.weight, 0, tensor_size)
    elif style in (*_COLUMNS, *_ROWS):
        is_conv1d = type(module).__name__ == "Conv1D"  # [inputs, outputs]
        dim = int((style in _COLUMNS) == is_conv1d)
        module.weight = _narrow_parameter(module.weight, dim, tensor_size)
        if style in _COLUMNS and isinstance(module.bias, nn.Parameter):
            module.bias = _narrow_parameter(module.bias, 0, tensor_size)
        if style in _COLUMNS and is_conv1d:
            module.nf = module.weight.shape[1]


def _narrow_parameter(parameter: nn.Parameter, dim: int, tensor_size: int) -> nn.Parameter:
    size = -(-parameter.shape[dim] // tensor_size)
    shard = parameter.detach().narrow(dim, 0, size).clone()
    return nn.Parameter(shard, requires_grad=parameter.requires_grad)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParamCounts:
    """A model's parameters.

    Attributes:
        blocks: Parameters of each block.
        other_weights: Parameters outside of blocks; tied parameters count once.
        embedding: Parameters of the input embedding; `other_weights` includes them.
        head: Parameters of the output head; `other_weights` includes them.
        experts: Parameters of experts that ranks can divide; `blocks` includes them.
        expert_layers: Indices of the blocks with such experts; the first blocks may be dense.
        num_experts: Experts of a layer, for each number that occurs.
        is_tied: Whether all parameters of the output head belong to the embedding.
        buffers: Bytes of buffers.
    """

    blocks: list[list[nn.Parameter]]
    other_weights: list[nn.Parameter]
    embedding: set[nn.Parameter]
    head: set[nn.Parameter]
    experts: set[nn.Parameter]
    expert_layers: frozenset[int]
    num_experts: frozenset[int]
    is_tied: bool
    buffers: int

    @property
    def parameters(self) -> int:
        """Elements of all parameters."""
        return num_elements(itertools.chain(self.other_weights, *self.blocks))

    @property
    def typical_layer(self) -> int:
        """The index of the block that stands for all blocks: the first one, or with experts."""
        return min(self.expert_layers, default=0)

    @property
    def shares_embedding(self) -> bool:
        """Whether the output head and the input embedding share a parameter."""
        return not self.embedding.isdisjoint(self.head)


def count_parameters(model: PreTrainedModel) -> ParamCounts:
    """Count the parameters of a model, which may be on the meta device."""
    block_modules = find_blocks(model)
    blocks = [list(block.parameters()) for block in block_modules]
    block_parameters = set(itertools.chain(*blocks))
    head_module = model.get_output_embeddings()
    head = set() if head_module is None else set(head_module.parameters())
    embedding = set(model.get_input_embeddings().parameters())
    experts = find_experts(model).values()
    return ParamCounts(
        blocks=blocks,
        other_weights=[p for p in model.parameters() if p not in block_parameters],
        embedding=embedding,
        head=head,
        experts={p for module in experts for p in module.parameters(recurse=False)},
        expert_layers=frozenset(i for i, block in enumerate(block_modules) if find_experts(block)),
        num_experts=frozenset(module.num_experts for module in experts),
        is_tied=head.issubset(embedding),
        buffers=sum(b.nbytes for b in model.buffers()),
    )


def num_elements(parameters: Iterable[nn.Parameter]) -> int:
    """Return the number of elements of some parameters."""
    return sum(p.numel() for p in parameters)


def shard_sizes(parameters: Iterable[nn.Parameter], ranks: int) -> tuple[int, int]:
    """Return the number of elements on rank 0 if ranks divide rows like `fully_shard`.

    Returns:
        Number of elements of all parameters, and of the trained parameters.
    """
    local_elements = trained_elements = 0
    for parameter in parameters:
        rows, *columns = parameter.shape or (1,)
        size = math.ceil(rows / ranks) * math.prod(columns)
        local_elements += size
        trained_elements += size * parameter.requires_grad
    return local_elements, trained_elements


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerMemory:
    """Memory and traffic of an optimizer.

    Attributes:
        per_element: Bytes of optimizer state for each trained element.
        extra: What extensions keep in addition, by kind.
        traffic: What it sends where ranks divide the weights; None if it sends nothing.
    """

    per_element: float
    extra: Mapping[str, StateMemory]
    traffic: MatrixTraffic | None


def count_optimizer_memory(options: PlanOptions, model: PreTrainedModel) -> OptimizerMemory:
    """Create the optimizer on the meta device as the trainer does, and count its state.

    State that extensions keep for each parameter counts too.
    """
    extensions = make_extensions(options)
    with fake_ranks(options.nodes * options.gpus_per_node):
        factory = choose_factory(options, extensions, seed=0)
        factory.inspect_model(model)
        run_optimizer = factory.make(model, None)
    extension_bytes = sum(extension.bytes_per_parameter() for extension in extensions)
    return OptimizerMemory(
        per_element=_state_bytes_per_element(run_optimizer.optimizer, model) + extension_bytes,
        extra=run_optimizer.memory(),
        traffic=run_optimizer.traffic(),
    )


def _state_bytes_per_element(optimizer: torch.optim.Optimizer, model: nn.Module) -> float:
    """Return the bytes of optimizer state for each trained element."""
    trained_elements = num_elements(p for p in model.parameters() if p.requires_grad)
    leaves = tree_leaves(list(optimizer.state.values()))
    tensors = {leaf for leaf in leaves if isinstance(leaf, torch.Tensor)}
    return sum(tensor.nbytes for tensor in tensors) / trained_elements


@contextlib.contextmanager
def fake_ranks(world_size: int) -> Iterator[None]:
    """Form a process group of `world_size` ranks as rank 0; its collectives return at once."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()
