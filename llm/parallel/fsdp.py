"""Weights, gradients and optimizer state sharded over ranks (ZeRO stage 3, HSDP).

PyTorch's `fully_shard` all-gathers a block's weights before they are used and reduce-scatters its
gradients. Each rank's optimizer updates its local shards. These are plain tensors, so any
elementwise optimizer works. See Rajbhandari et al. 2020, arXiv:1910.02054, and Zhao et al. 2023,
arXiv:2304.11277.
"""

import contextlib
import itertools
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel

from llm.checkpoint.format import OPTIMIZER_TENSORS
from llm.data.loader import MicroBatch
from llm.models.loss import HeadLoss, LanguageModelLoss
from llm.models.patches.routers import float32_routers
from llm.models.sizes import find_blocks
from llm.parallel.base import AcceleratedStrategy
from llm.parallel.context import SequenceShard, divide_attention
from llm.parallel.dims import ParallelDims
from llm.parallel.expert_parallel import (
    average_expert_gradients,
    divide_experts,
    make_expert_groups,
)
from llm.parallel.float8 import precomputed_float8_scales, unwrap_float8_weight
from llm.parallel.options import ParallelOptions
from llm.parallel.tensor import divide_layers, find_partial_gradients

_BF16_POLICY = MixedPrecisionPolicy(
    param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False
)


class ShardedStrategy(AcceleratedStrategy):
    """Every rank holds a shard of the weights, gradients and optimizer state.

    Args:
        options: Sequence parallelism, unsharded gradients, and float8 messages.
        accelerator: The processes, devices and precision.
        dims: How many ranks each kind of parallelism has.
        init_weights: Allocates and initializes this rank's shards of a model on the meta device;
            None if the model has weights.

    Attributes:
        dims: The same.
        mesh: The process groups that shard or replicate weights.
    """

    mesh: DeviceMesh
    communicates_in_forward = True

    def __init__(
        self,
        options: ParallelOptions,
        accelerator: Accelerator,
        dims: ParallelDims,
        *,
        init_weights: Callable[[PreTrainedModel], None] | None = None,
    ) -> None:
        super().__init__(accelerator)
        self.dims = dims
        self.data_rank, self.data_ranks = dims.data_rank(self.rank), dims.data_ranks
        self.rng_rank = dims.rng_rank(self.rank)
        # Context-parallel ranks shard the weights too, as ranks with other samples do.
        self.mesh = init_device_mesh(
            self.device.type,
            dims.mesh_sizes,
            mesh_dim_names=("pipeline", "replicate", "shard", "tensor"),
        )
        self._expert_groups = make_expert_groups(dims, self.mesh) if dims.expert > 1 else None
        self._uses_ddp = dims.shards_only_experts
        self.sequence = SequenceShard(dims, self.rank) if dims.context > 1 else None
        self._sequence_parallel = options.sequence_parallel
        self._partial_gradients: list[str] = []
        self._divided_experts: list[nn.Parameter] = []
        self._unsharded_gradients = options.unsharded_gradients
        self._gathers_in_fp8 = options.fp8_all_gather
        self._init_weights = init_weights
        self._embedding: FSDPModule | None = None
        self._head: FSDPModule | None = None
        coordinates = dims.coordinates(self.rank)
        # Ranks that differ only on these axes have the same sums, so one of them counts.
        self._counts_in_sums = coordinates["tensor"] == 0 and coordinates["pipeline"] == 0
        if self.scaler is not None:
            # An overflow in one rank's shard must lower the scale on all ranks.
            self.scaler = ShardedGradScaler(self.device.type)

    def _shard_model(self) -> None:
        """Divide attention, layers and experts as the dims say, then shard the weights by FSDP."""
        if self.sequence is not None:
            divide_attention(self.model, self.sequence)
        self._divide_layers()
        if self.dims.shards_only_experts:
            self._divide_experts(self.model, self._gradient_mesh)
        elif self._num_gradient_ranks > 1:
            self._shard_weights()
        # The head belongs to the group of its loss, which is not inside the model.
        self._allocate_weights([self.loss, *([] if self._head is None else [self._head])])

    def _shard_weights(self) -> None:
        """Shard the experts, the blocks, and, if they are not tied, the embedding and the head."""
        blocks = [*find_blocks(self.model)]
        embedding_and_head = _untied_embedding_and_head(self.loss)
        self._divide_experts(self.model, self._gradient_mesh)
        self._shard_modules(
            self.loss, blocks, self._gradient_mesh, separate_modules=embedding_and_head
        )
        register_fsdp_forward_method(self.loss, "predict_tokens")
        if embedding_and_head:
            self._shard_embedding_and_head(*embedding_and_head)
        embedding, head = embedding_and_head[:1], embedding_and_head[1:]
        _prefetch_in_order(self.loss, *embedding, *blocks, *head)

    def _divide_layers(self) -> None:
        """Apply tensor parallelism before FSDP, which shards the results."""
        if self.dims.tensor > 1:
            sequence_parallel = self._sequence_parallel
            divide_layers(self.model, self.mesh["tensor"], sequence_parallel=sequence_parallel)
            if sequence_parallel:
                self._partial_gradients = find_partial_gradients(self.model)

    def _divide_experts(self, model: nn.Module, mesh: DeviceMesh) -> None:
        """Apply expert parallelism before FSDP, which ignores the results."""
        if self._expert_groups is not None:
            self._divided_experts += divide_experts(model, mesh, self._expert_groups)

    @property
    def _gradient_mesh(self) -> DeviceMesh:
        """The ranks that average gradients: all shards, or experts, and their replicas."""
        if self.mesh["replicate"].size() > 1:
            return self.mesh["replicate", "shard"]
        return self.mesh["shard"]

    def _shard_modules(
        self,
        root: nn.Module,
        blocks: Sequence[nn.Module],
        mesh: DeviceMesh,
        *,
        separate_modules: Sequence[nn.Module] = (),
        **options: Any,
    ) -> None:
        """Shard each block as one group, and everything else as the group of the root.

        In bf16 runs a block is all-gathered in bf16, and its gradients are summed in float32
        because in bf16 each addition would round. Autocast leaves the gains of norms in float32,
        and routers may compute in float32. Both are in the root's group: a separate all-gather for
        these few weights of each block would take as long as the all-gather of its matrices.

        Args:
            root: The module that runs the blocks in its forward.
            blocks: The transformer blocks in it.
            mesh: The ranks.
            separate_modules: Modules in it that are sharded later, as separate groups.
            options: Further arguments of `fully_shard`.
        """
        gathers_in_bf16 = self._gathers_in_bf16
        policy = _BF16_POLICY if gathers_in_bf16 else MixedPrecisionPolicy()
        # The root comes first, so that it does not look for such weights in sharded blocks.
        block_parameters = {
            parameter
            for module in (*blocks, *separate_modules)
            for parameter in module.parameters()
        }
        root_parameters: set[nn.Parameter] = set()
        if gathers_in_bf16:
            root_parameters.update(*(_find_float32_weights(block) for block in blocks))
        fully_shard(root, mesh=mesh, ignored_params=block_parameters - root_parameters, **options)
        for block in blocks:
            ignored_params = set(self._divided_experts)
            if gathers_in_bf16:
                ignored_params |= _find_float32_weights(block)  # sharding has replaced the tensors
            fully_shard(
                block, mesh=mesh, mp_policy=policy, ignored_params=ignored_params, **options
            )

    @property
    def _gathers_in_bf16(self) -> bool:
        return self.accelerator.mixed_precision in ("bf16", "fp8")

    def _shard_embedding_and_head(self, embedding: nn.Module, head: nn.Module) -> None:
        """Shard embedding and head as separate groups, so that blocks do not wait for the head.

        The embedding is gathered in float32 because its rows begin the residual stream. In bf16
        runs the loss uses the head in bf16, so it is gathered in bf16. Its gradient stays float32
        because the loss sums it in float32.
        """
        mesh = self._gradient_mesh
        self._embedding = fully_shard(embedding, mesh=mesh)
        self._embedding.set_unshard_in_backward(False)  # the gradient of a lookup needs no rows
        # The gradient of a DTensor passes through a view, which would round it.
        gathers_in_bf16 = self._gathers_in_bf16 and self.dims.tensor == 1
        policy = _BF16_POLICY if gathers_in_bf16 else MixedPrecisionPolicy()
        # Its backward pass follows its forward pass at once.
        self._head = fully_shard(head, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
        if isinstance(head, HeadLoss):
            register_fsdp_forward_method(head, "predict_tokens")
        if gathers_in_bf16:
            head.register_forward_pre_hook(_keep_float32_gradients)

    def _allocate_weights(self, roots: Sequence[nn.Module | FSDPModule]) -> None:
        """Allocate and initialize a meta model by `roots`, the outermost modules with shards."""
        if self._init_weights is None:
            return
        self._init_weights(self.model)
        # At the first unshard of a root, FSDP copies weights that were allocated after sharding to
        # storage padded to one size. This must happen before the optimizer takes the tensors.
        for root in roots:
            if isinstance(root, FSDPModule):
                root.unshard()
                root.reshard()

    def _wrap_loss(self) -> nn.Module:
        """Let DistributedDataParallel, if it is used, ignore the experts."""
        if self._uses_ddp:
            experts = set(self._divided_experts)
            names = [name for name, p in self.loss.named_parameters() if p in experts]
            DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(self.loss, names)
        return super()._wrap_loss()

    def _localize_optimizer(self) -> None:
        """Let the optimizer update this rank's local shards, with shards of its state."""
        optimizer = self.optimizer
        state_by_parameter, optimizer.state = optimizer.state, defaultdict(dict)
        local_by_parameter: dict[Tensor, nn.Parameter] = {}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                local_parameter = nn.Parameter(local_tensor(parameter.detach()))
                local_by_parameter[parameter] = local_parameter
                state = state_by_parameter[parameter]
                optimizer.state[local_parameter] = {
                    key: local_tensor(moment) for key, moment in state.items()
                }
            group["params"] = [local_by_parameter[parameter] for parameter in group["params"]]
        self.run_optimizer.localize(local_by_parameter)

    def _local_batch(self, micro_batch: MicroBatch) -> MicroBatch:
        return micro_batch if self.sequence is None else self.sequence.local_batch(micro_batch)

    def predict(self, micro_batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """Return likeliest next tokens and labels' log-probabilities, of whole samples."""
        self._keep_embedding_gathered(is_kept=True)
        likeliest, log_probs = super().predict(micro_batch)
        if self.sequence is None:
            return likeliest, log_probs
        return self.sequence.gather(likeliest, 1), self.sequence.gather(log_probs, 1)

    @property
    def _num_gradient_ranks(self) -> int:
        return self.dims.data_ranks * self.dims.context

    def _weight_casts(self, micro_batches: int) -> contextlib.AbstractContextManager[None]:
        """Keep no copies, because gathered weights are freed after each block."""
        if self._gathers_in_fp8:
            return precomputed_float8_scales(self.model)
        return contextlib.nullcontext()

    def _configure_gradient_sync(self, is_last: bool) -> contextlib.AbstractContextManager[Any]:
        """All-reduce over replicas in the last micro-batch only.

        The reduce-scatter over shards runs in every micro-batch, unless unsharded gradients may
        accumulate. Weights outside the blocks stay gathered until the last micro-batch, so they are
        sent once per step. In the last micro-batch, the embedding is freed after its lookup and the
        head after its backward pass.
        """
        if self._uses_ddp:
            return super()._configure_gradient_sync(is_last)
        if not isinstance(self.loss, FSDPModule):
            return contextlib.nullcontext()
        self.loss.set_requires_all_reduce(is_last)
        if self._unsharded_gradients:
            self.loss.set_requires_gradient_sync(is_last)
        for module in (self.loss, self._embedding, self._head):
            if module is not None:
                module.set_reshard_after_backward(is_last, recurse=False)
        self._keep_embedding_gathered(is_kept=not is_last)
        return contextlib.nullcontext()

    def _keep_embedding_gathered(self, *, is_kept: bool) -> None:
        """Keep the embedding gathered after its lookup, for the next micro-batch, or free it."""
        if self._embedding is not None:
            self._embedding.set_reshard_after_forward(not is_kept, recurse=False)

    def evaluate(self, micro_batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """Return the sum of token losses and the number of labels, of this rank's slice."""
        self._keep_embedding_gathered(is_kept=True)
        return super().evaluate(micro_batch)

    def _reduce_gradients(self) -> None:
        """Complete partial gradients, and give each local shard its gradient."""
        self._sum_partial_gradients()
        average_expert_gradients(self._divided_experts)
        for parameter, local_parameter in zip(self.parameters, self.local_parameters, strict=True):
            gradient = parameter.grad
            if isinstance(parameter, DTensor) and isinstance(gradient, DTensor):
                # The gradient of a replicated weight may be a pending sum.
                gradient = gradient.redistribute(placements=parameter.placements)
                parameter.grad = gradient
            local_parameter.grad = None if gradient is None else local_tensor(gradient)

    def _sum_partial_gradients(self) -> None:
        """Add the gradients of tokens on other tensor-parallel ranks, in one message per step."""
        if not self._partial_gradients:
            return
        parameters = [self.model.get_parameter(name) for name in self._partial_gradients]
        gradients = [local_tensor(p.grad) for p in parameters]
        flat_gradients = torch.cat([gradient.flatten() for gradient in gradients])
        dist.all_reduce(flat_gradients, group=self.mesh.get_group("tensor"))
        sizes = [gradient.numel() for gradient in gradients]
        for gradient, gradient_sum in zip(gradients, flat_gradients.split(sizes), strict=True):
            gradient.copy_(gradient_sum.view_as(gradient))

    def _norm_parameters(self) -> list[Tensor]:
        """Return the parameters with gradients that this rank adds to the norm."""
        return self.parameters

    def _compute_gradient_norm(self) -> Tensor:
        """Return the norm of the whole gradient; each shard counts once."""
        gradients_by_axes: dict[tuple[str, ...], list[Tensor]] = {}
        for parameter in self._norm_parameters():
            if parameter.grad is not None:
                axes = _find_sharded_axes(parameter)
                gradients_by_axes.setdefault(axes, []).append(local_tensor(parameter.grad))
        squared_norm = torch.zeros((), device=self.device)
        # Sorted, so that all ranks call the collectives in the same order.
        for axes, gradients in sorted(gradients_by_axes.items()):
            partial_square = torch.nn.utils.get_total_norm(gradients).square()
            for axis in axes:
                dist.all_reduce(partial_square, group=self.mesh.get_group(axis))
            squared_norm += partial_square
        return squared_norm.sqrt()

    def reduce_sum(self, values: Tensor) -> Tensor:
        """Return the sum over all slices of the data; every rank must call it."""
        return super().reduce_sum(values if self._counts_in_sums else torch.zeros_like(values))

    def gather(self, values: Tensor) -> Tensor:
        """Concatenate equally shaped tensors of all slices of the data; every rank must call it."""
        values_by_rank = super().gather(values).unflatten(0, (self.world_size, -1))
        first_rank_by_slice: dict[int, int] = {}  # of the ranks with the same samples
        for rank in range(self.world_size):
            first_rank_by_slice.setdefault(self.dims.data_rank(rank), rank)
        slice_values: Tensor = values_by_rank[list(first_rank_by_slice.values())]
        return slice_values.flatten(0, 1)

    def _collect_optimizer_state(self) -> dict[Tensor, dict[str, Tensor]]:
        """Return the optimizer's state by the model's parameters, as DTensors like these."""
        named_parameters = self.model.named_parameters()
        name_by_parameter: dict[Tensor, str] = {p: name for name, p in named_parameters}
        state_by_parameter, state_by_shard = {}, self.optimizer.state
        for parameter, local_parameter in zip(self.parameters, self.local_parameters, strict=True):
            state = dict(state_by_shard.get(local_parameter, {}))
            for key, value in state.items():
                path = f"{OPTIMIZER_TENSORS}{name_by_parameter[parameter]}/{key}"
                if self.run_optimizer.owner_of(path) is None:  # else whole, at its owner
                    state[key] = wrap_as_dtensor(value, like=parameter)
            if state:
                state_by_parameter[parameter] = state
        return state_by_parameter

    def owner_ranks(self, path: str) -> Sequence[int]:
        """Return the ranks that hold a checkpoint's tensor; one of them writes it."""
        stage_ranks, owner_index = self._stage_ranks(path), self.run_optimizer.owner_of(path)
        ranks_per_replica = self.mesh["shard"].size() * self.mesh["tensor"].size()
        return stage_ranks if owner_index is None else stage_ranks[owner_index::ranks_per_replica]

    def _stage_ranks(self, path: str) -> Sequence[int]:
        """Return the ranks of the stages with a checkpoint's tensor."""
        return range(self.world_size)

    def state_dict(self) -> dict[str, Any]:
        """Return model, optimizer and loss scale, by parameter name, as live shards."""
        reshard(self.wrapped)
        state = super().state_dict()
        shards = {
            name: wrap_as_dtensor(local_tensor(tensor), like=tensor)
            for name, tensor in state["model"].items()
        }
        return state | {"model": shards}

    def gather_full_state_dict(self) -> dict[str, Tensor]:
        """Return the whole model's parameters and persistent buffers on rank 0's host."""
        reshard(self.wrapped)
        state_dict = {}
        for name, tensor in self.model.state_dict().items():
            gathered = full_tensor(tensor)  # on all ranks, because it is an all-gather
            if self.rank == 0:
                state_dict[name] = gathered.detach().cpu()
        return state_dict


def _find_float32_weights(block: nn.Module) -> set[nn.Parameter]:
    """Return the parameters of a block that bf16 runs use in float32.

    These are the parameters of routers in float32, and of modules that have a gain or a bias, and
    no matrix.
    """
    float32_parameters = {
        parameter for router in float32_routers(block) for parameter in router.parameters()
    }
    for module in block.modules():
        module_parameters = set(module.parameters(recurse=False))
        if all(parameter.ndim < 2 for parameter in module_parameters):
            float32_parameters |= module_parameters
    return float32_parameters


def _untied_embedding_and_head(loss: LanguageModelLoss) -> list[nn.Module]:
    """Return the embedding and the module that reads the head; none if they share a weight."""
    embedding, head = loss.model.get_input_embeddings(), loss.model.get_output_embeddings()
    if not set(embedding.parameters()).isdisjoint(head.parameters()):
        return []
    return [embedding, head if loss.head_loss is None else loss.head_loss]


def _prefetch_in_order(*modules: Any) -> None:
    """Let each module gather the next module's weights before it computes.

    In backward passes PyTorch does this by default, in reverse order.
    """
    for module, next_module in itertools.pairwise(modules):
        module.set_modules_to_forward_prefetch([next_module])


def _keep_float32_gradients(module: nn.Module, _: Any) -> None:
    """Let the gathered weights of a module accept gradients of a wider dtype."""
    for parameter in module.parameters():
        parameter.grad_dtype = torch.float32


def reshard(root: nn.Module) -> None:
    """Free unsharded weights left by an evaluation, so that the parameters are the shards."""
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def local_tensor(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a tensor, in the same memory."""
    return unwrap_float8_weight(tensor.to_local()) if isinstance(tensor, DTensor) else tensor


def full_tensor(tensor: Tensor) -> Tensor:
    """Return the whole of a tensor; every rank that holds a shard must call it."""
    if not isinstance(tensor, DTensor):
        return tensor
    dtensor: Any = wrap_as_dtensor(local_tensor(tensor), like=tensor)
    gathered: Tensor = dtensor.full_tensor()
    return gathered


def wrap_as_dtensor(local_moment: Tensor, *, like: Tensor) -> Tensor:
    """Return this rank's shard of a moment as a DTensor with the parameter's placements.

    The DTensor shares the memory of the shard.

    Args:
        local_moment: A tensor in the shape of the parameter's shard, apart from dimensions of size
            1 that ranks do not divide; a scalar is returned unchanged.
        like: The parameter.
    """
    if not isinstance(like, DTensor) or local_moment.ndim == 0:
        return local_moment
    shape, stride = like.shape, like.stride()
    shard_shape = local_tensor(like).shape
    if local_moment.shape != shard_shape:
        sizes = zip(local_moment.shape, shard_shape, shape, strict=True)
        shape = torch.Size(
            [full_size if size == shard_size else size for size, shard_size, full_size in sizes]
        )
        stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        local_moment, like.device_mesh, like.placements, run_check=False, shape=shape, stride=stride
    )


def _find_sharded_axes(parameter: Tensor) -> tuple[str, ...]:
    """Return the mesh axes that shard a parameter."""
    if not isinstance(parameter, DTensor):
        return ()
    names = parameter.device_mesh.mesh_dim_names or ()
    return tuple(
        name
        for name, placement in zip(names, parameter.placements, strict=True)
        if not placement.is_replicate()
    )
