"""Expert parallelism: ranks divide the experts of a layer, and tokens are sent to them.

Each rank holds the experts that sharding gives it, with the same placement. An all-to-all brings
each token to the ranks of its experts, and a second one brings the results back (Lepikhin et al.
2020, arXiv:2006.16668). If more ranks shard the weights than exchange tokens, the ranks at the same
place of each exchange gather the experts of one another.
"""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from transformers import PreTrainedModel

from llm.errors import ConfigError
from llm.models.mixtures import find_experts, find_routed_experts
from llm.parallel.dims import ParallelDims


class ExpertGroups(NamedTuple):
    """The process groups of a rank for its experts.

    Attributes:
        exchange: Ranks that divide all experts of a layer, and send tokens to each other.
        sharing: Ranks that hold shards of the same experts, and gather them; None if a rank has
            all of its experts.
    """

    exchange: dist.ProcessGroup
    sharing: dist.ProcessGroup | None


def make_expert_groups(dims: ParallelDims, mesh: DeviceMesh) -> ExpertGroups:
    """Make the groups for experts; every rank must call it.

    Args:
        dims: How many ranks each kind of parallelism has.
        mesh: With the axis `shard`, which divides the experts.
    """
    if mesh["shard"].size() == dims.expert:
        return ExpertGroups(mesh.get_group("shard"), None)
    exchange_group, sharing_group = (
        dist.new_subgroups_by_enumeration(groups)[0] for groups in dims.list_expert_groups()
    )
    return ExpertGroups(exchange_group, sharing_group)


def check_expert_parallel(model: PreTrainedModel, dims: ParallelDims) -> None:
    """Refuse a model with experts that cannot be divided over ranks.

    Args:
        model: The whole model; its weights may be on the meta device.
        dims: How many ranks each kind of parallelism has.

    Raises:
        ConfigError: The model has no experts, they lack transformers' common interface, or the
            number of ranks does not divide the experts of a layer.
    """
    expert_counts = sorted({experts.num_experts for experts in find_experts(model).values()})
    model_type, option = model.config.model_type, f"--expert_parallel_size {dims.expert}"
    if not expert_counts:
        raise _missing_experts_error(model, option)
    size_by_option = {option: dims.expert}
    if dims.shard > 1:  # a shard has the same number of whole experts on each rank
        size_by_option[f"--data_parallel_shard_size {dims.shard}"] = dims.shard
    for num_experts in expert_counts:
        for size_option, size in size_by_option.items():
            if num_experts % size:
                divisors = [str(n) for n in range(2, num_experts + 1) if num_experts % n == 0]
                raise ConfigError(
                    f"{size_option} does not divide the {num_experts} experts of a layer of "
                    f"{model_type}, which --expert_parallel_size needs; choose one of "
                    f"{', '.join(divisors)}."
                )


def _missing_experts_error(model: PreTrainedModel, option: str) -> ConfigError:
    """Return the error for a model without experts that can be divided."""
    model_type, settings = model.config.model_type, model.config.get_text_config().to_dict()
    has_experts = any("experts" in name and value for name, value in settings.items())
    if has_experts or find_routed_experts(model):
        return ConfigError(
            f"{option} cannot divide the experts of {model_type}, which lack transformers' "
            "common interface of experts; leave it out."
        )
    return ConfigError(f"{option} divides experts, and {model_type} has none; leave it out.")


def divide_experts(model: nn.Module, mesh: DeviceMesh, groups: ExpertGroups) -> list[nn.Parameter]:
    """Give each rank its experts of each layer, and send tokens to them.

    Args:
        model: The model, or a rank's stages of it; changed in place.
        mesh: The ranks that FSDP would shard the experts over, with the last axis `shard`; if there
            is another one before it, its ranks are replicas.
        groups: The ranks of `shard` that send tokens to each other, or gather experts.

    Returns:
        The divided parameters, which FSDP must not touch. Their gradients are the sums over the
        tokens of all ranks of `shard`; `average_expert_gradients` completes them.
    """
    placements = [Replicate()] * (mesh.ndim - 1) + [Shard(0)]
    divided_parameters: list[nn.Parameter] = []
    for experts in find_experts(model).values():
        for name, parameter in list(experts.named_parameters(recurse=False)):
            # A copy: a view would keep all experts in memory.
            shard = distribute_tensor(
                parameter.detach(), mesh, placements, src_data_rank=None
            ).clone()
            experts.register_parameter(name, nn.Parameter(shard, parameter.requires_grad))
            divided_parameters.append(experts.get_parameter(name))
        experts.forward = torch.compiler.disable(_ExpertDispatch(experts, groups))
    return divided_parameters


def average_expert_gradients(parameters: list[nn.Parameter]) -> None:
    """Turn the gradients of divided experts into means over ranks, as FSDP's are.

    Args:
        parameters: The result of `divide_experts`, after the backward passes of a step.
    """
    for parameter in parameters:
        if isinstance(parameter.grad, DTensor):
            gradient, mesh = parameter.grad.to_local(), parameter.grad.device_mesh
            gradient.div_(mesh.size())
            if mesh.ndim > 1:
                dist.all_reduce(gradient, group=mesh.get_group(0))


class _ExpertDispatch:
    """The forward pass of a layer's experts on all ranks that divide them.

    It replaces the method `forward` of the experts, so that hooks on them see the tokens of this
    rank with the numbers of all experts. All ranks run the same operations in the same order,
    whatever the routers choose, so that their collectives match in a recomputation too.

    The host waits for the device once in a forward pass of a layer: an all-to-all takes its sizes
    from the host. Meanwhile the device sorts the tokens and gathers experts. Backward passes have
    the sizes.
    """

    def __init__(self, experts: Any, groups: ExpertGroups) -> None:
        self._experts, self._groups = experts, groups
        self._forward = experts.forward
        self._num_experts = int(experts.num_experts)
        self._num_ranks = groups.exchange.size()
        self._num_local_experts = self._num_experts // self._num_ranks
        num_sharing_ranks = 1 if groups.sharing is None else groups.sharing.size()
        # A rank's experts are chunks that are `num_ranks` apart; tokens are sorted by rank.
        positions = torch.arange(self._num_experts + 1)
        positions[:-1] = (
            positions[:-1].view(self._num_ranks, num_sharing_ranks, -1).transpose(0, 1).flatten()
        )
        self._position_by_expert = positions if num_sharing_ranks > 1 else None

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return the weighted sum of the outputs of each token's experts, [tokens, width].

        Args:
            hidden_states: [tokens, width].
            top_k_index: [tokens, k], experts of the layer; `num_experts` stands for none (Zaya).
            top_k_weights: [tokens, k].
        """
        expert_ids, experts_per_token = top_k_index.reshape(-1), top_k_index.shape[-1]
        if self._position_by_expert is not None:
            self._position_by_expert = self._position_by_expert.to(expert_ids.device)
            expert_ids = self._position_by_expert[expert_ids]
        local_counts, message_sizes = self._exchange_counts(expert_ids)
        # The device has this to do while the host waits for the sizes.
        sent_order = expert_ids.argsort(stable=True)  # by expert, and so by rank
        tokens = _to_autocast_dtype(hidden_states[sent_order // experts_per_token])
        shards, weights = self._gather_local_weights()
        num_sent_by_rank, num_received_by_rank = message_sizes.wait()
        num_sent = sum(num_sent_by_rank)
        if num_sent < len(sent_order):  # the last ones have no expert
            sent_order, tokens = sent_order[:num_sent], tokens[:num_sent]

        tokens = all_to_all_single_autograd(
            tokens, num_received_by_rank, num_sent_by_rank, self._groups.exchange
        )
        local_ids = self._list_local_ids(local_counts, num_tokens=sum(num_received_by_rank))
        outputs = self._run_local_experts(tokens, local_ids, weights)
        if self._groups.sharing is not None:
            outputs = _FreeExperts.apply(  # type: ignore[no-untyped-call]
                outputs, self._groups.sharing, *shards.values(), *weights.values()
            )
        outputs = outputs.contiguous()
        outputs = all_to_all_single_autograd(
            outputs, num_sent_by_rank, num_received_by_rank, self._groups.exchange
        )

        outputs = outputs.new_zeros(len(expert_ids), outputs.shape[1]).index_copy(
            0, sent_order, outputs
        )
        weighted_outputs = outputs.view(*top_k_index.shape, -1) * top_k_weights.unsqueeze(-1)
        return weighted_outputs.sum(1).to(hidden_states.dtype)

    def _exchange_counts(self, expert_ids: Tensor) -> "tuple[Tensor, _HostCopy]":
        """Tell each rank how many tokens its experts will get.

        Args:
            expert_ids: The experts in the order of the ranks, [tokens x k].

        Returns:
            The tokens for this rank's experts by sending rank and expert, [experts]; and the tokens
            that this rank sends to, and receives from, each rank, [2, ranks].
        """
        counts = expert_ids.new_zeros(self._num_experts + 1)
        counts = counts.scatter_add_(0, expert_ids, torch.ones_like(expert_ids))
        counts = counts[: self._num_experts]
        local_counts = torch.empty_like(counts)
        dist.all_to_all_single(local_counts, counts, group=self._groups.exchange)
        counts_by_rank = torch.stack([counts, local_counts]).view(2, self._num_ranks, -1)
        return local_counts, _HostCopy(counts_by_rank.sum(2))

    def _list_local_ids(self, local_counts: Tensor, *, num_tokens: int) -> Tensor:
        """Return the index of each received token's expert on this rank, [tokens]."""
        local_ids = torch.arange(self._num_local_experts, device=local_counts.device)
        local_ids = local_ids.repeat(self._num_ranks)
        return local_ids.repeat_interleave(local_counts, output_size=num_tokens)

    def _gather_local_weights(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return this rank's shards of experts, and the weights of the experts that it computes."""
        shards = {
            name: parameter.to_local()
            for name, parameter in self._experts.named_parameters(recurse=False)
            if isinstance(parameter, DTensor)
        }
        sharing = self._groups.sharing
        if sharing is None:
            return shards, shards
        gathered = {
            name: _GatherExperts.apply(shard, sharing)  # type: ignore[no-untyped-call]
            for name, shard in shards.items()
        }
        return shards, gathered

    def _run_local_experts(
        self, tokens: Tensor, local_ids: Tensor, weights: dict[str, Tensor]
    ) -> Tensor:
        """Return the output of one of this rank's experts for each token, [tokens, width].

        Args:
            tokens: Hidden states, [tokens, width].
            local_ids: Index of each token's expert among the experts of this rank, [tokens].
            weights: The weights of these experts, by name.
        """
        # One more token, dropped below, so that a rank without tokens runs the same operations.
        tokens = torch.cat([tokens, tokens.new_zeros(1, tokens.shape[1])])
        local_ids = torch.cat([local_ids, local_ids.new_zeros(1)])
        experts, factors = self._experts, tokens.new_ones(len(tokens), 1)
        # Their class takes them for all experts of the layer. Python looks up an attribute here
        # before torch looks up the parameters.
        experts.__dict__.update(weights)
        experts.num_experts = self._num_local_experts
        try:
            outputs: Tensor = self._forward(tokens, local_ids.unsqueeze(1), factors)
        finally:
            experts.num_experts = self._num_experts
            for name in weights:
                del experts.__dict__[name]
        return outputs[:-1]


class _HostCopy:
    """A copy of a small tensor to the host, which does not wait for it before `wait`."""

    def __init__(self, values: Tensor) -> None:
        self._values = values.to("cpu", non_blocking=True)  # in pinned memory, from a GPU
        self._event = None
        if values.device.type != "cpu":
            self._event = torch.get_device_module(values.device).Event()
            self._event.record()

    def wait(self) -> list[list[int]]:
        """Return the values, [rows, columns]."""
        if self._event is not None:
            self._event.synchronize()
        values: list[list[int]] = self._values.tolist()
        return values


class _GatherExperts(torch.autograd.Function):
    """Gathers experts from the ranks that hold shards of them; its gradient is a reduce-scatter.

    Matrices travel in the dtype in which autocast multiplies them, and gradients in float32.
    """

    @staticmethod
    def forward(ctx: Any, shard: Tensor, group: dist.ProcessGroup) -> Tensor:
        """Return the experts of all ranks, [experts of the group, ...]."""
        ctx.group, ctx.dtype = group, shard.dtype
        if shard.ndim == 3:
            shard = _to_autocast_dtype(shard)
        gathered = shard.new_empty(group.size() * len(shard), *shard.shape[1:])
        dist.all_gather_into_tensor(gathered, shard.contiguous(), group=group)
        return gathered

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        """Return the sum over ranks of the gradient of this rank's shard."""
        gradient = gradients[0].to(ctx.dtype).contiguous()
        shard_gradient = gradient.new_empty(len(gradient) // ctx.group.size(), *gradient.shape[1:])
        dist.reduce_scatter_tensor(shard_gradient, gradient, group=ctx.group)
        return shard_gradient, None


class _FreeExperts(torch.autograd.Function):
    """The identity on outputs of gathered experts, which frees these until the backward pass."""

    @staticmethod
    def forward(
        ctx: Any, outputs: Tensor, group: dist.ProcessGroup, *shards_and_weights: Tensor
    ) -> Tensor:
        """Free the gathered weights, and return the outputs.

        Args:
            ctx: The context of autograd.
            outputs: The outputs of the experts.
            group: The ranks with shards of these experts.
            shards_and_weights: This rank's shards; then the weights gathered from each of them.
        """
        ctx.group = group
        # A recomputation replaces the saved tensors by those that its products have saved.
        ctx.save_for_backward(*shards_and_weights)
        is_recomputation = torch._C._current_graph_task_id() != -1
        if not is_recomputation:  # else the backward pass follows at once
            num_weights = len(shards_and_weights) // 2
            for weight in shards_and_weights[num_weights:]:
                weight.untyped_storage().resize_(0)
        return outputs.view_as(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Gather the weights again, into the memory that the products refer to."""
        shards_and_weights = ctx.saved_tensors  # a checkpoint allows one access
        num_weights = len(shards_and_weights) // 2
        shards, weights = shards_and_weights[:num_weights], shards_and_weights[num_weights:]
        for shard, weight in zip(shards, weights, strict=True):
            freed_weight = weight.data  # autograd would take a write for a change of the weight
            if freed_weight.untyped_storage().size() == 0:
                freed_weight.untyped_storage().resize_(freed_weight.nbytes)
                shard_cast = shard.detach().to(freed_weight.dtype).contiguous()
                dist.all_gather_into_tensor(freed_weight, shard_cast, group=ctx.group)
        return gradients[0], None, *[None] * (2 * num_weights)


def _to_autocast_dtype(tokens: Tensor) -> Tensor:
    """Cast tokens as autocast would for the products of experts, to send fewer bytes."""
    device_type = tokens.device.type
    if not torch.is_autocast_enabled(device_type):
        return tokens
    return tokens.to(torch.get_autocast_dtype(device_type))
