"""Expert parallelism: ranks divide the experts of a layer, and tokens are sent to them.

The ranks are those that share the weights. Each holds the experts that sharding gives it, with the
same placement, but they are never gathered: an all-to-all brings each token to the ranks of its
experts, and a second one brings the results back (Lepikhin et al. 2020, arXiv:2006.16668).
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from transformers import PreTrainedModel

from llm.errors import ConfigError
from llm.models.mixtures import find_experts


def check_expert_parallel(model: PreTrainedModel, num_ranks: int) -> None:
    """Refuse a model with experts that cannot be divided over ranks.

    Args:
        model: The whole model; its weights may be on the meta device.
        num_ranks: Number of ranks that divide the experts of a layer.

    Raises:
        ConfigError: The model has no experts, they lack transformers' common interface, or the
            number of ranks does not divide the experts of a layer.
    """
    expert_counts = sorted({experts.num_experts for experts in find_experts(model).values()})
    model_type, option = model.config.model_type, f"--expert_parallel_size {num_ranks}"
    if not expert_counts:
        settings = model.config.get_text_config().to_dict()
        if any("experts" in name and value for name, value in settings.items()):
            raise ConfigError(
                f"{option} cannot divide the experts of {model_type}, which lack transformers' "
                "common interface of experts; leave it out."
            )
        raise ConfigError(f"{option} divides experts, and {model_type} has none; leave it out.")
    for num_experts in expert_counts:
        if num_experts % num_ranks:
            divisors = [str(n) for n in range(2, num_experts + 1) if num_experts % n == 0]
            raise ConfigError(
                f"{option} does not divide the {num_experts} experts of a layer of {model_type}; "
                f"choose one of {', '.join(divisors)} for it and for --data_parallel_shard_size."
            )


def divide_experts(model: nn.Module, mesh: DeviceMesh) -> list[nn.Parameter]:
    """Give each rank its experts of each layer, and send tokens to them.

    Args:
        model: The model, or a rank's stages of it; changed in place.
        mesh: The ranks that FSDP would shard the experts over, with the last axis `shard`; if there
            is another one before it, its ranks are replicas.

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
        experts.forward = torch.compiler.disable(_ExpertDispatch(experts, mesh["shard"]))
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

    The host waits for the device once in a pass of a layer: an all-to-all takes its sizes from the
    host.
    """

    def __init__(self, experts: Any, mesh: DeviceMesh) -> None:
        self._experts, self._group, self._num_ranks = experts, mesh.get_group(), mesh.size()
        self._forward = experts.forward
        self._num_experts = int(experts.num_experts)
        self._num_local_experts = self._num_experts // self._num_ranks

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return the weighted sum of the outputs of each token's experts, [tokens, width].

        Args:
            hidden_states: [tokens, width].
            top_k_index: [tokens, k], experts of the layer; `num_experts` stands for none (Zaya).
            top_k_weights: [tokens, k].
        """
        expert_ids, k = top_k_index.reshape(-1), top_k_index.shape[-1]
        sent_order = expert_ids.argsort(stable=True)  # by expert, and so by rank
        counts = expert_ids.new_zeros(self._num_experts + 1)
        counts = counts.scatter_add_(0, expert_ids, torch.ones_like(expert_ids))
        counts = counts[: self._num_experts]
        local_counts = torch.empty_like(counts)  # of this rank's experts, by sending rank
        dist.all_to_all_single(local_counts, counts, group=self._group)
        counts_by_rank = torch.stack([counts, local_counts]).view(2, self._num_ranks, -1)
        num_sent, num_received = counts_by_rank.sum(2).tolist()
        sent_order = sent_order[: sum(num_sent)]

        tokens = _to_autocast_dtype(hidden_states[sent_order // k])
        tokens = all_to_all_single_autograd(tokens, num_received, num_sent, self._group)
        local_ids = torch.arange(self._num_local_experts, device=tokens.device)
        local_ids = local_ids.repeat(self._num_ranks)
        local_ids = local_ids.repeat_interleave(local_counts, output_size=sum(num_received))
        outputs = self._run_local_experts(tokens, local_ids).contiguous()
        outputs = all_to_all_single_autograd(outputs, num_sent, num_received, self._group)

        outputs = outputs.new_zeros(len(expert_ids), outputs.shape[1]).index_copy(
            0, sent_order, outputs
        )
        weighted = outputs.view(*top_k_index.shape, -1) * top_k_weights.unsqueeze(-1)
        return weighted.sum(1).to(hidden_states.dtype)

    def _run_local_experts(self, tokens: Tensor, local_ids: Tensor) -> Tensor:
        """Return the output of one of this rank's experts for each token, [tokens, width].

        Args:
            tokens: Hidden states, [tokens, width].
            local_ids: Index of each token's expert among the experts of this rank, [tokens].
        """
        # One more token, dropped below, so that a rank without tokens runs the same operations.
        tokens = torch.cat([tokens, tokens.new_zeros(1, tokens.shape[1])])
        local_ids = torch.cat([local_ids, local_ids.new_zeros(1)])
        weights = tokens.new_ones(len(tokens), 1)
        with self._local_weights():
            outputs: Tensor = self._forward(tokens, local_ids.unsqueeze(1), weights)
        return outputs[:-1]

    @contextlib.contextmanager
    def _local_weights(self) -> Iterator[None]:
        """Show this rank's experts to their class as all experts of the layer."""
        experts = self._experts
        local_weights = {
            name: parameter.to_local()
            for name, parameter in experts.named_parameters(recurse=False)
            if isinstance(parameter, DTensor)
        }
        # Python looks up an attribute here before torch looks up the parameters.
        experts.__dict__.update(local_weights)
        experts.num_experts = self._num_local_experts
        try:
            yield
        finally:
            experts.num_experts = self._num_experts
            for name in local_weights:
                del experts.__dict__[name]


def _to_autocast_dtype(tokens: Tensor) -> Tensor:
    """Cast tokens as autocast would for the products of experts, to send fewer bytes."""
    device_type = tokens.device.type
    if not torch.is_autocast_enabled(device_type):
        return tokens
    return tokens.to(torch.get_autocast_dtype(device_type))
