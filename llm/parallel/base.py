"""A model and its training step on one device, or replicated by DistributedDataParallel."""

import contextlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from llm.checkpoint.format import MODEL_TENSORS, check_same_parameters, model_tensors
from llm.data.loader import MicroBatch
from llm.metrics.rank_times import ComputeClock
from llm.models.weight_casts import cast_weights_once
from llm.optim.run_optimizer import RunOptimizer
from llm.parallel.accelerator import order_gradient_buckets
from llm.parallel.float8 import convert_to_fp8
from llm.runtime.labels import IGNORED

if TYPE_CHECKING:
    from llm.parallel.context import SequenceShard

MakeOptimizer = Callable[[nn.Module, DeviceMesh | None], RunOptimizer]
"""From the model, or this rank's shards of it, and the ranks that divide it."""


class AcceleratedStrategy:
    """Base strategy: single device or DDP. Other layouts derive from it.

    Every rank holds the whole model. Other layouts override the private steps of `prepare` and
    `forward_backward`; the rest of the package calls the public methods. Returned tensors stay on
    the device, so a step never waits for it.

    Args:
        accelerator: The processes, devices and precision, from `make_accelerator`.

    Attributes:
        device: Device of this process.
        rank: Rank of this process.
        world_size: Number of ranks.
        data_rank: Index of this rank's slice of a global batch.
        data_ranks: Number of equal slices of a global batch.
        rng_rank: Seed offset for dropout; ranks that process the same tokens share it.
        mesh: The ranks that divide the model; None if every rank has all of it.
        sequence: This rank's shard of each sample; None if every rank has whole samples.
        run_optimizer: The optimizer, and what else it does in a step; `prepare` makes it.
        optimizer: The optimizer alone.
        answer_delay: Maximum calls of `reduce_flags` between a flag and its answer.
        parameters: The trained parameters of the model; DTensors if sharded.
        local_parameters: Tensors that the optimizer updates: `parameters`, or this rank's shards.
        sum_names: Names of the sums that `forward_backward` returns, from the loss.
        token_weight: Factor on the loss of each token in this rank's objective, in this step.
        skipped: 1.0 if the last `optimizer_step` was skipped, else 0.0.
        communicates_in_forward: Whether ranks wait for each other in the forward pass.
        compute_clock: Measures each step up to the collectives of its last backward pass; None
            measures nothing.
    """

    mesh: DeviceMesh | None = None
    sequence: "SequenceShard | None" = None
    answer_delay: int = 1
    communicates_in_forward: bool = False
    compute_clock: ComputeClock | None = None
    _uses_ddp = True
    _gathers_in_fp8 = False

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator = accelerator
        self.device: torch.device = accelerator.device
        self.rank: int = accelerator.process_index
        self.world_size: int = accelerator.num_processes
        self.data_rank, self.data_ranks = self.rank, self.world_size
        self.rng_rank = self.rank
        self.scaler: torch.amp.GradScaler | None = accelerator.scaler
        self._is_fp16_on_cpu = self.scaler is not None and self.device.type == "cpu"
        self._pending_flags: tuple[Any, Tensor] | None = None
        self._learning_rate = 0.0
        self.token_weight = 1.0
        self.skipped = torch.zeros((), device=self.device)

    def prepare(self, loss: nn.Module, make_optimizer: MakeOptimizer) -> None:
        """Prepare the model, inside its loss, and create its optimizer.

        Args:
            loss: Returns the objective and the sums for the log, by its `names`; its `model` is the
                model.
            make_optimizer: Called after sharding, so that moments are sharded too.
        """
        self.loss: Any = loss
        self.sum_names = cast("tuple[str, ...]", loss.names)
        self.model: Any = loss.get_submodule("model")
        if self.accelerator.mixed_precision == "fp8":
            convert_to_fp8(self.model, all_gather=self._gathers_in_fp8)
        self._shard_model()
        self.run_optimizer = make_optimizer(self.model, self.mesh)
        self.optimizer = self.run_optimizer.optimizer
        self.parameters = _optimizer_parameters(self.optimizer)
        self._localize_optimizer()
        self.local_parameters = _optimizer_parameters(self.optimizer)
        self.wrapped = self._wrap_loss()
        with self.autocast():
            order_gradient_buckets(self.wrapped, self.device)

    def _shard_model(self) -> None:
        """Replace the model's parameters by this rank's shards of them."""

    def _localize_optimizer(self) -> None:
        """Replace the optimizer's parameters by this rank's local tensors."""

    def _wrap_loss(self) -> nn.Module:
        """Return the loss in Accelerate's autocast; evaluation mode bypasses DDP."""
        with warnings.catch_warnings():
            # Accelerate passes broadcast_buffers by its older name.
            warnings.filterwarnings("ignore", "`broadcast_buffers`", FutureWarning)
            wrapped: nn.Module = self.accelerator.prepare_model(
                self.loss, device_placement=False, evaluation_mode=not self._uses_ddp
            )
        return wrapped

    def set_learning_rate(self, learning_rate: float) -> None:
        """Set the learning rate of the next `optimizer_step`."""
        self._learning_rate = learning_rate
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate * group.get("rate_factor", 1.0)

    def forward_backward(self, micro_batches: Sequence[MicroBatch], *, num_tokens: int) -> Tensor:
        """Compute the gradient of one step's mean loss, unscaled; return the sums for the log.

        Args:
            micro_batches: This rank's slice of the step.
            num_tokens: Tokens with a label over all ranks; the loss is divided by it once.

        Returns:
            The sums of this rank's slice by `sum_names`, the token losses first.
        """
        if self.compute_clock is not None:
            self.compute_clock.start()
        if not self.wrapped.training:
            self.wrapped.train()
        self.optimizer.zero_grad(set_to_none=True)
        for parameter in self.parameters:  # not the optimizer's tensors, which may be shards
            parameter.grad = None
        # The all-reduce takes the mean over ranks, but the step's loss is a sum over them.
        self.token_weight = self._num_gradient_ranks / num_tokens
        local_batches = [self._local_batch(micro_batch) for micro_batch in micro_batches]
        sums = self._accumulate_gradients(local_batches)
        self._reduce_gradients()
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
        return sums

    @property
    def _num_gradient_ranks(self) -> int:
        """Number of ranks that average their gradients."""
        return self.world_size

    def _local_batch(self, micro_batch: MicroBatch) -> MicroBatch:
        """Return this rank's part of each sample."""
        return micro_batch

    def _accumulate_gradients(self, micro_batches: Sequence[MicroBatch]) -> Tensor:
        """Run forward and backward of all micro-batches; return the sums for the log."""
        step_sums = torch.zeros((), device=self.device)
        with self._record_step(), self._weight_casts(len(micro_batches)):
            for index, micro_batch in enumerate(micro_batches):
                is_last = index == len(micro_batches) - 1
                with self._configure_gradient_sync(is_last):
                    with self.autocast():
                        objective, sums = self.wrapped(*micro_batch)
                    if is_last and self.compute_clock is not None:
                        self.compute_clock.stop()
                    self._scale_objective(objective * self.token_weight).backward()
                step_sums = step_sums + sums
        return step_sums

    def _record_step(self) -> contextlib.AbstractContextManager[None]:
        """Return the optimizer's context around the passes of a step."""
        return self.run_optimizer.record_passes(
            token_weight=self.token_weight, loss_scale=self.loss_scale
        )

    def _weight_casts(self, num_micro_batches: int) -> contextlib.AbstractContextManager[None]:
        """Cast the weights once per step; with one micro-batch, copies would only live longer."""
        is_half_precision = self._is_fp16_on_cpu or self.accelerator.mixed_precision != "no"
        casts_pay_off = is_half_precision and num_micro_batches > 1
        return cast_weights_once(self.device) if casts_pay_off else contextlib.nullcontext()

    def _configure_gradient_sync(self, is_last: bool) -> contextlib.AbstractContextManager[Any]:
        """All-reduce gradients in the backward of a step's last micro-batch only (no_sync)."""
        return contextlib.nullcontext() if is_last else self.accelerator.no_sync(self.wrapped)

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """Return the context of the run's precision, to run the model in."""
        if self._is_fp16_on_cpu:  # which Accelerate does not know
            return torch.autocast("cpu", torch.float16)
        return self.accelerator.autocast()  # type: ignore[no-any-return]

    def _scale_objective(self, objective: Tensor) -> Tensor:
        """Multiply an objective by the loss scale of fp16."""
        return objective if self.scaler is None else self.scaler.scale(objective)

    def _reduce_gradients(self) -> None:
        """Complete the backward pass and set the gradients of `local_parameters`."""

    def optimizer_step(self, max_grad_norm: float) -> tuple[Tensor, Tensor]:
        """Clip the gradient (0: no clipping) and update the weights, or skip the step.

        Returns:
            The gradient's norm before clipping, and 1.0 if it was not finite and the step skipped,
            else 0.0. Both are equal on all ranks that share weights.
        """
        self.run_optimizer.before_clip(learning_rate=self._learning_rate)
        norm = self._compute_gradient_norm()
        if max_grad_norm > 0:
            self._clip_gradients(norm, max_grad_norm)
        self.skipped = (~torch.isfinite(norm)).to(torch.float32)
        # The fused optimizers read this flag on the device: with it set they change nothing.
        # GradScaler.step would wait for its own; the norm covers overflows in every precision.
        self.optimizer.found_inf = self.skipped  # type: ignore[attr-defined]
        self.optimizer.step()
        if self.scaler is not None:
            self.scaler.update()
        return norm, self.skipped

    def _compute_gradient_norm(self) -> Tensor:
        """Return the norm of the whole gradient, the same on all ranks."""
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        return torch.nn.utils.get_total_norm(gradients)

    def _clip_gradients(self, norm: Tensor, max_grad_norm: float) -> None:
        """Scale the gradient to the largest norm, if its norm is larger."""
        if type(self.optimizer) is torch.optim.AdamW and norm.dtype == torch.float32:
            # The fused kernel divides gradients by this, which saves a pass over all of them.
            scale = torch.clamp((norm + 1e-6) / max_grad_norm, min=1.0)
            self.optimizer.grad_scale = scale  # type: ignore[attr-defined]
        else:
            torch.nn.utils.clip_grads_with_norm_(self.local_parameters, max_grad_norm, norm)

    def averaged(self) -> contextlib.AbstractContextManager[Tensor | None]:
        """Give the model the weights to evaluate inside the context; every rank enters it.

        If ranks have separate weights, this is their mean, and the context yields the RMS distance
        from the mean, relative to its norm. Otherwise it yields None.
        """
        return contextlib.nullcontext()

    @torch.no_grad()
    def evaluate(self, micro_batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """Return the sum of token losses and the number of labels, of this rank's slice."""
        self.wrapped.eval()
        micro_batch = self._local_batch(micro_batch)
        with self.autocast():
            _, sums = self.wrapped(*micro_batch)
        return sums[0], (micro_batch.labels != IGNORED).sum()

    @torch.no_grad()
    def predict(self, micro_batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """Return the likeliest next tokens, int64, and the labels' log-probabilities, float32."""
        self.wrapped.eval()
        with self.autocast():
            likeliest, log_probs = self.loss.predict_tokens(*self._local_batch(micro_batch)[:4])
        return likeliest, log_probs

    def loss_scale(self) -> Tensor:
        """Return the loss scale (1 without fp16)."""
        # scale() multiplies on the device, where get_scale() would wait for it.
        return self._scale_objective(torch.ones((), device=self.device))

    def reduce_sum(self, values: Tensor) -> Tensor:
        """Return the sum over all slices of the data; every rank must call it."""
        return self.accelerator.reduce(values, reduction="sum")  # type: ignore[no-any-return]

    def gather(self, values: Tensor) -> Tensor:
        """Concatenate equally shaped tensors of all slices of the data; every rank must call it."""
        return self.accelerator.gather(values)  # type: ignore[no-any-return]

    def reduce_flags(self, flags: Sequence[bool]) -> list[bool]:
        """Return the flags that any rank has set now or up to `answer_delay` calls ago.

        Every rank must call it. The answer is the same on all ranks, and comes once: gloo
        all-reduces the flags during the next step, and the next call returns the result.
        """
        if self.world_size == 1:
            return list(flags)
        reduced_flags = [False] * len(flags)
        if self._pending_flags is not None:
            work, flag_counts = self._pending_flags
            work.wait()
            reduced_flags = [count > 0 for count in flag_counts.tolist()]
        flag_counts = torch.tensor([float(flag) for flag in flags])
        work = dist.all_reduce(flag_counts, async_op=True)
        self._pending_flags = work, flag_counts
        return reduced_flags

    def barrier(self) -> None:
        """Wait for all ranks."""
        self.accelerator.wait_for_everyone()

    def close(self) -> None:
        """Finish the trackers and leave the process groups."""
        # Gloo's threads must drop their last tensors first: destroying a group waits with the GIL
        # held.
        self.barrier()
        try:
            self.accelerator.end_training()
        except Exception:  # a tracker has no room on the disk; without it, leave the groups
            self.accelerator.trackers = []
            self.accelerator.end_training()

    def state_dict(self) -> dict[str, Any]:
        """Return model, optimizer and loss scale, by parameter name, as live tensors."""
        named_parameters = self.model.named_parameters()
        name_by_parameter: dict[Tensor, str] = {p: name for name, p in named_parameters}
        moments = self._collect_optimizer_state()
        return {
            "model": model_tensors(self.model),
            "optimizer": {
                name_by_parameter[parameter]: moments[parameter]
                for parameter in self.parameters
                if parameter in moments
            },
            "scaler": {} if self.scaler is None else self.scaler.state_dict(),
        }

    def _collect_optimizer_state(self) -> Mapping[Tensor, dict[str, Tensor]]:
        """Return the optimizer's state by the model's parameters, for those that have one."""
        return self.optimizer.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what `state_dict` returned.

        Raises:
            CheckpointError: The state belongs to another model.
        """
        local_state, optimizer_state = self.state_dict(), self.optimizer.state
        for part in ("model", "optimizer"):
            check_same_parameters(part, local_state[part], state[part])
        with torch.no_grad():
            for name, tensor in local_state["model"].items():
                tensor.copy_(state["model"][name])
            for name, parameter in self.model.named_parameters():
                for key, moment in optimizer_state.get(parameter, {}).items():
                    moment.copy_(state["optimizer"][name][key])
        if self.scaler is not None and state["scaler"]:
            self.scaler.load_state_dict(state["scaler"])

    def owner_ranks(self, path: str) -> Sequence[int]:
        """Return the ranks that hold a checkpoint's tensor; one of them writes it."""
        owner = self.run_optimizer.owner_of(path)
        return range(self.world_size) if owner is None else [owner]

    def copied_first(self) -> set[str]:
        """Return the checkpoint paths that a save copies before the next step begins.

        Only the optimizer changes the rest; a forward pass may change the model's buffers.
        """
        return {MODEL_TENSORS + name for name, _ in self.model.named_buffers()}

    def gather_full_state_dict(self) -> dict[str, Tensor]:
        """Return the whole model's parameters and persistent buffers on the host, for export.

        Every rank must call it; all but rank 0 get an empty dict.
        """
        if self.rank != 0:
            return {}
        # Copies on a CPU too: with averaged weights the live ones change back. A tied weight stays
        # one tensor.
        state_dict: dict[str, Tensor] = {}
        copy_by_storage: dict[tuple[int, torch.Size], Tensor] = {}
        for name, tensor in self.model.state_dict().items():
            storage_key = tensor.data_ptr(), tensor.shape
            if storage_key not in copy_by_storage:
                copy_by_storage[storage_key] = tensor.to("cpu", copy=True)
            state_dict[name] = copy_by_storage[storage_key]
        return state_dict


def _optimizer_parameters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return the parameters of all groups, in their order."""
    return [p for group in optimizer.param_groups for p in group["params"]]
