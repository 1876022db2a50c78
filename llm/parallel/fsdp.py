"""Weights, gradients and optimizer state divided over ranks (ZeRO stage 3, HSDP).

PyTorch's `fully_shard` gathers a block's weights when they are needed and sums its gradients into
the ranks' parts. Every rank's optimizer steps its own parts, as plain tensors: no optimizer knows
that there is more of a weight elsewhere. See Rajbhandari et al. 2020, arXiv:1910.02054, and Zhao
et al. 2023, arXiv:2304.11277.
"""

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
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

from llm.data.loader import MicroBatch
from llm.parallel.base import AcceleratedStrategy, stepped_by
from llm.parallel.context import ContextPart
from llm.parallel.dims import ParallelDims
from llm.parallel.strategy import MakeOptimizer


def make_mesh(layout: ParallelDims, device_type: str) -> DeviceMesh:
    """The process groups over which weights are divided or copied; every rank must call it.

    Ranks that hold parts of one sample hold parts of the weights too, as those with other samples.
    """
    return init_device_mesh(
        device_type,
        (layout.pipeline, layout.replicate, layout.shard * layout.context, layout.tensor),
        mesh_dim_names=("pipeline", "replicate", "shard", "tensor"),
    )


class ShardedStrategy(AcceleratedStrategy):
    """Every rank holds a part of the weights, gradients and optimizer state.

    Args:
        accelerator: Accelerate's view of the processes, devices and precision.
        mixed_precision: no, fp8, fp16 or bf16.
        layout: Where the ranks stand.
        blocks: The model's layers, each of which is gathered as a whole.
        divide_layers: Leaves of each layer what this rank of the `tensor` axis computes.
        divide_attention: Lets the model's attention reach what other ranks hold of a sample;
            needed where the layout divides samples.
        fill: Gives the parts that this rank holds of a model on the meta device memory and
            weights; None where it has them.
    """

    def __init__(
        self,
        *,
        accelerator: Accelerator,
        mixed_precision: str,
        layout: ParallelDims,
        blocks: Iterable[nn.Module],
        divide_layers: Callable[[DeviceMesh], None] | None = None,
        divide_attention: Callable[[ContextPart], None] | None = None,
        fill: Callable[[Any], None] | None = None,
    ) -> None:
        super().__init__(accelerator=accelerator, mixed_precision=mixed_precision)
        self.layout = layout
        self.data_rank, self.data_ranks = layout.data_rank(self.rank), layout.data_ranks
        self.rng_rank = layout.rng_rank(self.rank)
        self.mesh = make_mesh(layout, self.device.type)
        self._context = ContextPart(layout, self.rank) if layout.context > 1 else None
        self._divide_attention = divide_attention
        self._blocks = blocks
        self._divide_layers = divide_layers
        self._fill = fill
        self._half_blocks = mixed_precision == "bf16"
        where = layout.coordinates(self.rank)
        # Of ranks that compute the same numbers, one counts.
        self._counts = where["tensor"] == 0 and where["pipeline"] == 0
        if self.scaler is not None:
            # A part of the gradient may be finite where another is not.
            self.scaler = ShardedGradScaler(self.device.type)

    def prepare(self, loss: nn.Module, make_optimizer: MakeOptimizer) -> None:
        """Divide the model (inside its loss) and make the optimizer of this rank's parts."""
        self.loss: Any = loss
        self.model = loss.get_submodule("model")
        if self._context is not None and self._divide_attention is not None:
            self._divide_attention(self._context)
        self._divide(loss)
        if self._fill is not None:
            self._fill(self.model)
            self._settle()
        self.optimizer = make_optimizer(self.model)
        self.parameters = stepped_by(self.optimizer)
        _step_parts(self.optimizer)
        self.stepped = stepped_by(self.optimizer)
        self.wrapped = self._wrap(loss)

    def _divide(self, loss: nn.Module) -> None:
        """Turn every parameter into this rank's part of it."""
        if self._divide_layers is not None:
            self._divide_layers(self.mesh["tensor"])
        if self._averaged_ranks == 1:
            return
        mesh = self._dividing_mesh
        for block in self._blocks:
            self._shard_block(block, mesh)
        fully_shard(loss, mesh=mesh)
        register_fsdp_forward_method(loss, "predictions")

    @property
    def _dividing_mesh(self) -> DeviceMesh:
        """The ranks whose gradients are averaged: those that hold parts, and copies of these."""
        if self.layout.replicate > 1:
            return self.mesh["replicate", "shard"]
        return self.mesh["shard"]

    def _settle(self) -> None:
        """Finalize the storage of shards before the optimizer is created.

        Memory that was given after the division is exchanged once more, at the first use of the
        weights, where parts are padded to one size.
        """
        for module in self._divided:
            if isinstance(module, FSDPModule):
                module.unshard()
                module.reshard()

    @property
    def _divided(self) -> Sequence[nn.Module]:
        """The outermost modules of which this rank holds parts."""
        return [self.loss]

    def _shard_block(self, block: nn.Module, mesh: DeviceMesh, **options: Any) -> None:
        """Divide a block, in bf16 runs with weights that are gathered as autocast wants them."""
        policy = MixedPrecisionPolicy()
        if self._half_blocks:
            # Autocast leaves the gains of norms as they are, and so do we.
            norms = [module for module in block.modules() if _is_norm(module)]
            if norms:
                fully_shard(norms, mesh=mesh, mp_policy=policy, **options)
            policy = MixedPrecisionPolicy(
                param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False
            )
        fully_shard(block, mesh=mesh, mp_policy=policy, **options)

    def _wrap(self, loss: nn.Module) -> nn.Module:
        # evaluation_mode: autocast as for training, and nothing that averages gradients.
        wrapped: nn.Module = self.accelerator.prepare_model(
            loss, device_placement=False, evaluation_mode=True
        )
        return wrapped

    def _own(self, micro_batch: MicroBatch) -> MicroBatch:
        """The part of each sample that this rank holds."""
        return micro_batch if self._context is None else self._context.of(micro_batch)

    def forward_backward(self, micro_batches: Sequence[MicroBatch], *, num_tokens: int) -> Tensor:
        """Compute the gradient of one step's mean loss; see `Strategy`."""
        own = [self._own(micro_batch) for micro_batch in micro_batches]
        return super().forward_backward(own, num_tokens=num_tokens)

    def evaluate(self, micro_batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """Sum of token losses and number of tokens that count, of what this rank holds."""
        return super().evaluate(self._own(micro_batch))

    def predict(self, micro_batch: MicroBatch) -> Tensor:
        """The likeliest next token at each position of whole samples."""
        predictions = super().predict(self._own(micro_batch))
        return predictions if self._context is None else self._context.gather(predictions, 1)

    @property
    def _averaged_ranks(self) -> int:
        return self.layout.data_ranks * self.layout.context

    def _communicating(self, last: bool) -> contextlib.AbstractContextManager[Any]:
        """Parts are summed at once, since a whole gradient has no room; copies at the end."""
        if isinstance(self.loss, FSDPModule):
            self.loss.set_requires_all_reduce(last)
        return contextlib.nullcontext()

    def _zero_gradients(self) -> None:
        super()._zero_gradients()
        for parameter in self.parameters:
            parameter.grad = None

    def _hand_over_gradients(self) -> None:
        for parameter, part in zip(self.parameters, self.stepped, strict=True):
            gradient = parameter.grad
            if isinstance(parameter, DTensor) and isinstance(gradient, DTensor):
                # Of a copied weight it may still be the ranks' terms.
                gradient = gradient.redistribute(placements=parameter.placements)
                parameter.grad = gradient
            part.grad = None if gradient is None else local_tensor(gradient)

    def _normed(self) -> list[Tensor]:
        """The parameters that this rank counts in the gradient's norm."""
        return self.parameters

    def _gradient_norm(self) -> Tensor:
        """Each part of the gradient counts once, wherever it lies."""
        by_axes: dict[tuple[str, ...], list[Tensor]] = {}
        for parameter in self._normed():
            if parameter.grad is not None:
                axes = _divided_over(parameter)
                by_axes.setdefault(axes, []).append(local_tensor(parameter.grad))
        total = torch.zeros((), device=self.device)
        for axes, gradients in sorted(by_axes.items()):
            square = torch.nn.utils.get_total_norm(gradients).square()
            for axis in axes:
                dist.all_reduce(square, group=self.mesh.get_group(axis))
            total += square
        return total.sqrt()

    def reduce_sum(self, values: Tensor) -> Tensor:
        """Sum over all shares of the data; every rank must call it."""
        return super().reduce_sum(values if self._counts else torch.zeros_like(values))

    def gather(self, values: Tensor) -> Tensor:
        """Concatenate tensors of one shape of all shares of the data along the first dimension."""
        everyone = super().gather(values).unflatten(0, (self.world_size, -1))
        first: dict[int, int] = {}
        for rank in range(self.world_size):
            first.setdefault(self.layout.data_rank(rank), rank)
        chosen: Tensor = everyone[list(first.values())]
        return chosen.flatten(0, 1)

    def _optimizer_state(self) -> dict[Tensor, dict[str, Tensor]]:
        return {
            parameter: {
                key: _like(parameter, value) for key, value in self.optimizer.state[part].items()
            }
            for parameter, part in zip(self.parameters, self.stepped, strict=True)
        }

    def state_dict(self) -> dict[str, Any]:
        """Model, optimizer and loss scale, by parameter name, as live parts."""
        self._reshard()
        return super().state_dict()

    def _reshard(self) -> None:
        """Give up the whole weights that an evaluation has left gathered."""
        for module in self.wrapped.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def full_state_dict(self) -> dict[str, Tensor]:
        """The model's parameters and persistent buffers on rank 0's host; empty elsewhere."""
        self._reshard()
        whole = {}
        for name, tensor in self.model.state_dict().items():
            gathered = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            if self.rank == 0:
                whole[name] = gathered.detach().cpu()
        return whole


def _is_norm(module: nn.Module) -> bool:
    """Whether a module has gains of its own, or a bias, and no matrix."""
    own = list(module.parameters(recurse=False))
    return bool(own) and all(parameter.ndim < 2 for parameter in own)


def local_tensor(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor; the same memory."""
    if not isinstance(tensor, DTensor):
        return tensor
    part: Tensor = tensor.to_local()
    return part


def _like(parameter: Tensor, value: Tensor) -> Tensor:
    """A tensor of an optimizer's state as what it is of the whole one; the same memory."""
    if not isinstance(parameter, DTensor) or value.ndim == 0:
        return value
    return DTensor.from_local(
        value,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def _divided_over(parameter: Tensor) -> tuple[str, ...]:
    """The mesh's axes along which ranks hold different parts of a parameter."""
    if not isinstance(parameter, DTensor):
        return ()
    names = parameter.device_mesh.mesh_dim_names or ()
    return tuple(
        name
        for name, placement in zip(names, parameter.placements, strict=True)
        if not placement.is_replicate()
    )


def _step_parts(optimizer: torch.optim.Optimizer) -> None:
    """Let an optimizer, which has not stepped yet, have this rank's parts for its parameters."""
    state, optimizer.state = optimizer.state, defaultdict(dict)
    for group in optimizer.param_groups:
        whole = group["params"]
        group["params"] = [nn.Parameter(local_tensor(parameter.detach())) for parameter in whole]
        for parameter, part in zip(whole, group["params"], strict=True):
            optimizer.state[part] = {
                key: local_tensor(value) for key, value in state[parameter].items()
            }
