"""One device, or data parallelism over several, through Accelerate."""

import contextlib
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator

from llm.checkpoint.format import model_tensors
from llm.data.loader import MicroBatch
from llm.errors import ParallelError
from llm.parallel.strategy import MakeOptimizer, SecondOrder, SpreadOptimizer


def stepped_by(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """All tensors that an optimizer changes."""
    return [p for group in optimizer.param_groups for p in group["params"]]


class AcceleratedStrategy:
    """Every rank holds the whole model; gradients are averaged by DistributedDataParallel.

    Args:
        accelerator: Accelerate's view of the processes, devices and precision.
        mixed_precision: no, fp8, fp16 or bf16.
    """

    second_order: SecondOrder | None = None
    """Set by who makes the optimizer, where K-FAC is part of it."""

    answer_delay: int = 1

    def __init__(self, *, accelerator: Accelerator, mixed_precision: str) -> None:
        self.accelerator = accelerator
        self.device: torch.device = accelerator.device
        self.rank: int = accelerator.process_index
        self.world_size: int = accelerator.num_processes
        self.data_rank, self.data_ranks = self.rank, self.world_size
        self.rng_rank = self.rank
        self._fp16_on_cpu = mixed_precision == "fp16" and self.device.type == "cpu"
        scaler = accelerator.scaler
        if self._fp16_on_cpu:
            scaler = torch.amp.GradScaler("cpu")
        self.scaler: torch.amp.GradScaler | None = scaler
        self._host_group = dist.new_group(backend="gloo") if self.world_size > 1 else None
        self._vote: tuple[Any, torch.Tensor] | None = None

    def prepare(self, loss: torch.nn.Module, make_optimizer: MakeOptimizer) -> None:
        """Take over the model (inside its loss) and make its optimizer."""
        self.loss: Any = loss
        self.model = loss.get_submodule("model")
        self.optimizer = make_optimizer(self.model)
        self.parameters = self.stepped = stepped_by(self.optimizer)
        self.wrapped = self._wrap(loss)

    def _wrap(self, loss: torch.nn.Module) -> torch.nn.Module:
        """Put around the loss what averages gradients."""
        with warnings.catch_warnings():
            # Accelerate hands on the older name of broadcast_buffers.
            warnings.filterwarnings("ignore", "`broadcast_buffers`", FutureWarning)
            # device_placement: the model was built where it lives.
            wrapped: torch.nn.Module = self.accelerator.prepare_model(loss, device_placement=False)
        return wrapped

    def set_learning_rate(self, learning_rate: float) -> None:
        """Set the rate of the next `optimizer_step`."""
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate

    def forward_backward(
        self, micro_batches: Sequence[MicroBatch], *, num_tokens: int
    ) -> torch.Tensor:
        """Compute the gradient of one step's mean loss; see `Strategy`."""
        if not self.wrapped.training:
            self.wrapped.train()
        self._zero_gradients()
        # The gradient is averaged over ranks where the loss wants their sum.
        weight = self._averaged_ranks / num_tokens
        total = torch.zeros((), device=self.device)
        with self._recording(weight):
            for number, micro_batch in enumerate(micro_batches, start=1):
                with self._communicating(number == len(micro_batches)):
                    with self._autocast():
                        objective, loss_sum = self.wrapped(*micro_batch)
                    self._scaled(objective * weight).backward()
                total += loss_sum.detach()
        self._hand_over_gradients()
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
        return total

    @property
    def _averaged_ranks(self) -> int:
        """Over how many ranks `backward` averages a gradient."""
        return self.world_size

    def _zero_gradients(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)

    def _hand_over_gradients(self) -> None:
        """Give the optimizer the gradients; here its parameters are the model's own."""

    def _recording(self, token_weight: float) -> contextlib.AbstractContextManager[None]:
        """K-FAC sees all micro-batches of a step, if there is K-FAC."""
        if self.second_order is None:
            return contextlib.nullcontext()
        return self.second_order.capture_stats(
            token_weight=token_weight, loss_scale=self.loss_scale()
        )

    def _communicating(self, last: bool) -> contextlib.AbstractContextManager[Any]:
        """Gradients cross the network with the last micro-batch of a step only."""
        if last:
            return contextlib.nullcontext()
        context: contextlib.AbstractContextManager[Any] = self.accelerator.no_sync(self.wrapped)
        return context

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        if self._fp16_on_cpu:
            return torch.autocast("cpu", torch.float16)
        # Elsewhere Accelerate has put the autocast around the model's forward.
        return contextlib.nullcontext()

    def _scaled(self, objective: torch.Tensor) -> torch.Tensor:
        return objective if self.scaler is None else self.scaler.scale(objective)

    def optimizer_step(self, max_grad_norm: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Clip and update, or skip on all ranks; see `Strategy`."""
        norm = self._gradient_norm()
        if max_grad_norm > 0:
            self._clip(norm, max_grad_norm)
        skipped = (~torch.isfinite(norm)).to(torch.float32)
        # The fused optimizers read this flag on the device: with it set they leave weights,
        # moments and step counts as they are. GradScaler.step would do the same after asking
        # the device for its own flag; the norm's covers that one and bf16 and float32 too.
        self.optimizer.found_inf = skipped  # type: ignore[attr-defined]
        self.optimizer.step()
        if self.scaler is not None:
            self.scaler.update()
        return norm, skipped

    def _gradient_norm(self) -> torch.Tensor:
        """The norm of the whole gradient, the same on all ranks."""
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        return torch.nn.utils.get_total_norm(gradients)

    def averaged(self) -> contextlib.AbstractContextManager[torch.Tensor | None]:
        """All ranks have the same weights, which are what is evaluated."""
        return contextlib.nullcontext()

    def _clip(self, norm: torch.Tensor, max_grad_norm: float) -> None:
        """Shorten the gradient to the largest norm, if it is longer."""
        if type(self.optimizer) is torch.optim.AdamW and norm.dtype == torch.float32:
            # Its kernel divides by this on the way, which saves a pass over all gradients.
            scale = torch.clamp((norm + 1e-6) / max_grad_norm, min=1.0)
            self.optimizer.grad_scale = scale  # type: ignore[attr-defined]
        else:
            torch.nn.utils.clip_grads_with_norm_(self.stepped, max_grad_norm, norm)

    @torch.no_grad()
    def evaluate(self, micro_batch: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Sum of token losses and number of tokens that count, on this rank."""
        if self.wrapped.training:
            self.wrapped.eval()
        with self._autocast():
            _, loss_sum = self.wrapped(*micro_batch)
        return loss_sum, (micro_batch.labels != -100).sum()

    @torch.no_grad()
    def predict(self, micro_batch: MicroBatch) -> torch.Tensor:
        """The likeliest next token at each position, int64 of the inputs' shape."""
        self.wrapped.eval()
        input_ids, _, positions, documents = micro_batch
        with self._autocast(), self.accelerator.autocast():
            predictions: torch.Tensor = self.loss.predictions(input_ids, positions, documents)
        return predictions

    def loss_scale(self) -> torch.Tensor:
        """The factor by which the loss is scaled (1 without fp16)."""
        one = torch.ones((), device=self.device)
        # scale() multiplies on the device, where get_scale() would wait for it.
        return one if self.scaler is None else self.scaler.scale(one)

    def reduce_sum(self, values: torch.Tensor) -> torch.Tensor:
        """Sum over all ranks; every rank must call it."""
        reduced: torch.Tensor = self.accelerator.reduce(values, reduction="sum")
        return reduced

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        """Concatenate equally shaped tensors of all ranks along the first dimension."""
        gathered: torch.Tensor = self.accelerator.gather(values)
        return gathered

    def any_rank(self, flags: Sequence[bool]) -> list[bool]:
        """Which flags were set on any rank at the last call; every rank must call it.

        The answer travels on the host while the next step is computed: the device
        is not involved, and no rank waits for another.
        """
        if self.world_size == 1:
            return list(flags)
        answer = [False] * len(flags)
        if self._vote is not None:
            work, values = self._vote
            work.wait()
            answer = [value > 0 for value in values.tolist()]
        values = torch.tensor([float(flag) for flag in flags])
        self._vote = dist.all_reduce(values, group=self._host_group, async_op=True), values
        return answer

    def share(self, value: Any) -> Any:
        """The value that rank 0 has, on every rank; every rank must call it."""
        values = [value]
        if self.world_size > 1:
            dist.broadcast_object_list(values, src=0, group=self._host_group)
        return values[0]

    def gather_objects(self, value: Any) -> list[Any]:
        """What each rank gives, as plain values, on every rank; every rank must call it."""
        values = [value] * self.world_size
        if self.world_size > 1:
            dist.all_gather_object(values, value, group=self._host_group)
        return values

    def barrier(self) -> None:
        """Wait for all ranks."""
        self.accelerator.wait_for_everyone()

    def close(self) -> None:
        """End the trackers and leave the process groups."""
        self.accelerator.end_training()

    def state_dict(self) -> dict[str, Any]:
        """Model, optimizer and loss scale, by parameter name, as live tensors."""
        names: dict[torch.Tensor, str] = {p: name for name, p in self.model.named_parameters()}
        moments = self._optimizer_state()
        return {
            "model": model_tensors(self.model),
            "optimizer": {names[p]: moments[p] for p in self.parameters if moments.get(p)},
            "scaler": {} if self.scaler is None else self.scaler.state_dict(),
        }

    def _optimizer_state(self) -> Mapping[torch.Tensor, dict[str, torch.Tensor]]:
        """What the optimizer keeps of each parameter of the model."""
        if isinstance(self.optimizer, SpreadOptimizer):
            return self.optimizer.gathered_state()
        return self.optimizer.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` gave.

        Raises:
            ParallelError: The state belongs to another model.
        """
        own = self.state_dict()
        for part in ("model", "optimizer"):
            if own[part].keys() != state[part].keys():
                raise ParallelError(f"The {part} of the saved state has other parameters.")
        with torch.no_grad():
            for name, tensor in own["model"].items():
                tensor.copy_(state["model"][name])
            # Not into `own`: what is gathered from ranks is a copy of the optimizer's state.
            for name, parameter in self.model.named_parameters():
                for key, tensor in self.optimizer.state.get(parameter, {}).items():
                    tensor.copy_(state["optimizer"][name][key])
        if self.scaler is not None and state["scaler"]:
            self.scaler.load_state_dict(state["scaler"])

    def owner_ranks(self, path: str) -> Sequence[int]:
        """All ranks hold the same."""
        return range(self.world_size)

    def full_state_dict(self) -> dict[str, torch.Tensor]:
        """The model's parameters and persistent buffers on rank 0's host; empty elsewhere."""
        if self.rank != 0:
            return {}
        return {name: tensor.detach().cpu() for name, tensor in self.model.state_dict().items()}
