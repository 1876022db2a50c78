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


def check_expert_parallel(model: PreTrainedModel, ranks: int) -> None:
    """Refuse a model with experts that cannot be divided over ranks.

    Args:
        model: The whole model; its weights may be on the meta device.
        ranks: Number of ranks that divide the experts of a layer.

    Raises:
        ConfigError: The model has no experts, they lack transformers' common interface, or the
            number of ranks does not divide the experts of a layer.
    """
    counts = sorted({experts.num_experts for experts in find_experts(model).values()})
    kind, option = model.config.model_type, f"--expert_parallel_size {ranks}"
    if not counts:
        settings = model.config.get_text_config().to_dict()
        if any("experts" in name and number for name, number in settings.items()):
            raise ConfigError(
                f"{option} cannot divide the experts of {kind}, which lack transformers' common "
                "interface of experts; leave it out."
            )
        raise ConfigError(f"{option} divides experts, and {kind} has none; leave it out.")
    for count in counts:
        if count % ranks:
            divisors = [str(n) for n in range(2, count + 1) if count % n == 0]
            raise ConfigError(
                f"{option} does not divide the {count} experts of a layer of {kind}; choose one "
                f"of {', '.join(divisors)} for it and for --data_parallel_shard_size."
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
    divided: list[nn.Parameter] = []
    for experts in find_experts(model).values():
        for name, parameter in list(experts.named_parameters(recurse=False)):
            # A copy: a view would keep all experts in memory.
            shard = distribute_tensor(
                parameter.detach(), mesh, placements, src_data_rank=None
            ).clone()
            experts.register_parameter(name, nn.Parameter(shard, parameter.requires_grad))
            divided.append(experts.get_parameter(name))
        experts.forward = torch.compiler.disable(_Dispatch(experts, mesh["shard"]))
    return divided


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


class _Dispatch:
    """The forward pass of a layer's experts on all ranks that divide them.

    It replaces the method `forward` of the experts, so that hooks on them see the tokens of this
    rank with the numbers of all experts. All ranks run the same operations in the same order,
    whatever the routers choose, so that their collectives match in a recomputation too.

    The host waits for the device once in a pass of a layer: an all-to-all takes its sizes from the
    host.
    """

    def __init__(self, experts: Any, mesh: DeviceMesh) -> None:
        self._experts, self._group, self._ranks = experts, mesh.get_group(), mesh.size()
        self._forward = experts.forward
        self._num_experts = int(experts.num_experts)
        self._num_local = self._num_experts // self._ranks

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return the weighted sum of the outputs of each token's experts, [tokens, width].

        Args:
            hidden_states: [tokens, width].
            top_k_index: [tokens, k]: experts of the layer; `num_experts` stands for none (Zaya).
            top_k_weights: [tokens, k].
        """
        chosen, k = top_k_index.reshape(-1), top_k_index.shape[-1]
        order = chosen.argsort(stable=True)  # by expert, and so by rank
        counts = chosen.new_zeros(self._num_experts + 1)
        counts = counts.scatter_add_(0, chosen, torch.ones_like(chosen))[: self._num_experts]
        local_counts = torch.empty_like(counts)  # of this rank's experts, by sending rank
        dist.all_to_all_single(local_counts, counts, group=self._group)
        sizes = torch.stack([counts, local_counts]).view(2, self._ranks, self._num_local).sum(2)
        num_sent, num_received = sizes.tolist()
        order = order[: sum(num_sent)]

        rows = _to_autocast_dtype(hidden_states[order // k])
        rows = all_to_all_single_autograd(rows, num_received, num_sent, self._group)
        experts = torch.arange(self._num_local, device=rows.device).repeat(self._ranks)
        experts = experts.repeat_interleave(local_counts, output_size=sum(num_received))
        outputs = self._run_local_experts(rows, experts).contiguous()
        outputs = all_to_all_single_autograd(outputs, num_sent, num_received, self._group)

        outputs = outputs.new_zeros(len(chosen), outputs.shape[1]).index_copy(0, order, outputs)
        weighted = outputs.view(*top_k_index.shape, -1) * top_k_weights.unsqueeze(-1)
        return weighted.sum(1).to(hidden_states.dtype)

    def _run_local_experts(self, rows: Tensor, experts: Tensor) -> Tensor:
        """Return the output of one of this rank's experts for each row, [rows, width].

        Args:
            rows: [rows, width].
            experts: Number of each row's expert among this rank's, [rows].
        """
        # One more row, dropped below, so that a rank without tokens runs the same operations.
        rows = torch.cat([rows, rows.new_zeros(1, rows.shape[1])])
        experts = torch.cat([experts, experts.new_zeros(1)])
        with self._local_weights():
            outputs: Tensor = self._forward(rows, experts.unsqueeze(1), rows.new_ones(len(rows), 1))
        return outputs[:-1]

    @contextlib.contextmanager
    def _local_weights(self) -> Iterator[None]:
        """Show this rank's experts to their class as all experts of the layer."""
        module = self._experts
        local = {
            name: parameter.to_local()
            for name, parameter in module.named_parameters(recurse=False)
            if isinstance(parameter, DTensor)
        }
        module.__dict__.update(local)  # an attribute is looked up here before the parameters
        module.num_experts = self._num_local
        try:
            yield
        finally:
            module.num_experts = self._num_experts
            for name in local:
                del module.__dict__[name]


def _to_autocast_dtype(rows: Tensor) -> Tensor:
    """Cast rows as autocast would for the products of experts, to send fewer bytes."""
    kind = rows.device.type
    return rows.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else rows
