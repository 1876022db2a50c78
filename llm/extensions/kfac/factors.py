"""The factors A and G of K-FAC: hooks that record a step's tokens, and moving averages."""

import contextlib
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _get_current_dispatch_mode, _pop_mode_temporarily
from torch.utils.checkpoint import _CachingTorchDispatchMode

from llm.extensions.kfac.layers import Layer, read_input


class Factor:
    """A token-weighted moving average of x x^T [size, size]; diagonal blocks if it is wide.

    Sum and count decay together, so the average is not biased towards its start, and tokens have
    equal weight in a step of any size. A step's sum is linear in its tokens: the sums of several
    ranks add up to the sum of one rank with all tokens.

    Args:
        name: Name of the layer, and A or G.
        size: Width of x.
        max_dim: Maximum width of a block.
        device: Device of all tensors.
        is_owned: Whether this rank keeps the average.
        needs_bases: Whether this rank keeps the bases.

    Attributes:
        sums: Decayed sum of x x^T of each block, fp32; empty if not owned.
        count: Decayed number of tokens, an fp32 scalar.
        bases: For each block, the eigenvectors of its average at the last decomposition, in
            columns; empty if not used.
        eigenvalues: For each block, the eigenvalues of these eigenvectors.
        widths: The blocks' widths.
    """

    def __init__(
        self,
        name: str,
        *,
        size: int,
        max_dim: int,
        device: torch.device,
        is_owned: bool = True,
        needs_bases: bool = True,
    ) -> None:
        self.name = name
        self.is_owned = is_owned
        self.device = device
        self.widths = choose_block_widths(size, max_dim)
        basis_widths = self.widths if needs_bases else []
        self.bases = [torch.eye(width, device=device) for width in basis_widths]
        self.eigenvalues = [torch.ones(width, device=device) for width in basis_widths]
        sum_widths = self.widths if is_owned else []
        self.sums = [torch.zeros(width, width, device=device) for width in sum_widths]
        self.count = torch.zeros((), device=device)
        self._step_sums: list[Tensor] | None = None
        self._step_count = torch.zeros((), device=device)

    def record(self, rows: Tensor) -> None:
        """Add the tokens of one micro-batch; all of them are dropped if any is not finite.

        Args:
            rows: [tokens, size], fp32.
        """
        if self._step_sums is None:
            self._step_sums = self._zero_blocks()
        products = [compute_gram_matrix(block) for block in rows.split(self.widths, dim=1)]
        # The trace of x x^T bounds all its entries, so one scalar tells whether all are finite.
        is_finite = torch.isfinite(torch.stack([product.trace() for product in products]).sum())
        for step_sum, product in zip(self._step_sums, products, strict=True):
            step_sum += torch.where(is_finite, product, 0.0)
        self._step_count += is_finite * len(rows)

    def pop_step_sums(self) -> tuple[list[Tensor], Tensor]:
        """Return and reset what `record` summed: x x^T of each block, and the number of tokens."""
        step_sums = self._step_sums or self._zero_blocks(), self._step_count
        self.discard_step()
        return step_sums

    def discard_step(self) -> None:
        """Discard the tokens recorded since the last `pop_step_sums`."""
        if self._step_sums is not None:
            self._step_sums, self._step_count = None, torch.zeros_like(self._step_count)

    def _zero_blocks(self) -> list[Tensor]:
        return [torch.zeros(width, width, device=self.device) for width in self.widths]

    def update_average(
        self,
        step_sums: list[Tensor],
        step_count: Tensor,
        *,
        decay: float,
        scale: Tensor | float = 1.0,
        update_mask: Tensor | float = 1.0,
    ) -> None:
        """Update the average with the tokens of a step.

        Args:
            step_sums: Sum of x x^T of each block over the tokens of all ranks.
            step_count: Number of these tokens.
            decay: Decay of the average.
            scale: Factor on x x^T.
            update_mask: 1, or 0 to leave the average unchanged; a tensor is read on the device.
        """
        # Without tokens, for example if the router did not choose an expert, the average stays.
        update_mask = update_mask * (step_count > 0)
        old_weight = 1 - (1 - decay) * update_mask
        for decayed_sum, step_sum in zip(self.sums, step_sums, strict=True):
            decayed_sum.mul_(old_weight).add_(step_sum * (scale * update_mask))
        self.count.mul_(old_weight).add_(step_count * update_mask)

    def averages(self) -> list[Tensor]:
        """Return the average of each block; zeros before the first token."""
        return [decayed_sum / self.count.clamp_min(1e-30) for decayed_sum in self.sums]

    def tensors(self) -> dict[str, Tensor]:
        """Return the live tensors that this rank keeps, by their keys in a checkpoint."""
        tensors = {"count": self.count} if self.is_owned else {}
        for key, blocks in (
            ("sum", self.sums),
            ("basis", self.bases),
            ("values", self.eigenvalues),
        ):
            tensors |= {f"{key}.{i}": block for i, block in enumerate(blocks)}
        return tensors


def compute_gram_matrix(rows: Tensor) -> Tensor:
    """Return rows^T @ rows, exactly symmetric; computes little more than half of a wide product.

    Args:
        rows: [tokens, size].
    """
    size = rows.shape[1]
    product = rows.new_empty(size, size)
    # Four bands from the diagonal on, mirrored; for a small matrix, a single product is as fast.
    band_width = size if size <= 256 else -(-size // 4)
    for start in range(0, size, band_width):
        end = start + band_width
        product[start:end, start:] = rows[:, start:end].T @ rows[:, start:]
        product[end:, start:end] = product[start:end, end:].T
        # On some processors, kernels round the entries (i, j) and (j, i) differently.
        square = product[start:end, start:end]
        square.copy_(square.tril() + square.tril(-1).T)
    return product


def choose_block_widths(size: int, max_dim: int) -> list[int]:
    """Return the widths, equal up to one, of the fewest diagonal blocks of at most `max_dim`.

    A width of max_dim + 1 is allowed, so that the column of ones for a bias does not cause another
    block.
    """
    num_blocks = max(1, -(-(size - 1) // max_dim))
    return [size // num_blocks + (i < size % num_blocks) for i in range(num_blocks)]


class UpdateTimes:
    """Host time of the updates since the last report.

    Measuring does not wait for the device. On a CPU this is the time of the updates. On a GPU it is
    the time to launch them and to wait for decompositions that the host reads. It is not saved: a
    resumed run measures again.
    """

    def __init__(self) -> None:
        self._seconds: Counter[str] = Counter()
        self._num_updates: Counter[str] = Counter()

    @contextlib.contextmanager
    def measure(
        self, update: Literal["factor", "inv"], *, ends_update: bool = True
    ) -> Iterator[None]:
        """Add the time of the block to an update.

        Args:
            update: Kind of update: averages or bases.
            ends_update: Whether the step's update ends with this block, so that it is counted.
        """
        start_time = time.perf_counter()
        yield
        self._seconds[update] += time.perf_counter() - start_time  # type: ignore[assignment]
        if ends_update:
            self._num_updates[update] += 1

    def pop_means(self) -> dict[str, Tensor]:
        """Return and reset `factor_update_ms` and `inv_update_ms`, the means over updates.

        Kinds of updates that did not happen since the last call are left out.
        """
        means = {
            f"{update}_update_ms": torch.tensor(1000 * self._seconds[update] / num_updates)
            for update, num_updates in self._num_updates.items()
        }
        self._seconds.clear()
        self._num_updates.clear()
        return means


class LayerToRecord(NamedTuple):
    """A layer with the factors that a step records.

    Attributes:
        layer: The layer.
        input_factor: A, the factor of the inputs; None if it is not recorded.
        output_factor: G, the factor of the output gradients; None if it is not recorded.
    """

    layer: Layer
    input_factor: Factor | None
    output_factor: Factor | None


@contextlib.contextmanager
def record_layers(layers: Iterable[LayerToRecord], update_times: UpdateTimes) -> Iterator[None]:
    """Record the tokens of all forward passes in the context; their backward belongs there too.

    All leading dimensions are flattened: each position of each sequence is a separate token
    ("expand" of Eschenhagen et al. 2023, arXiv:2311.00636). Positions with an ignored label count
    too: they add their input to A, but little to G, because they have no loss. Sums and counts do
    not depend on how a step's tokens are split into micro-batches or over ranks.
    """
    hooks_by_experts: dict[nn.Module, dict[str, Any]] = {}
    with contextlib.ExitStack() as contexts:
        for layer, input_factor, output_factor in layers:
            hook = _make_recording_hook(layer, input_factor, output_factor, update_times)
            if layer.is_stack:
                hooks_by_experts.setdefault(layer.module, {})[layer.weight_name] = hook
            else:
                handle = layer.module.register_forward_hook(hook, with_kwargs=True)
                contexts.callback(handle.remove)
        for experts, hook_by_weight_name in hooks_by_experts.items():
            contexts.enter_context(_hook_experts(experts, hook_by_weight_name))
        # Compiled graphs do not support these hooks, so the model runs uncompiled.
        contexts.enter_context(torch.compiler.set_stance("force_eager"))
        yield


def _make_recording_hook(
    layer: Layer,
    input_factor: Factor | None,
    output_factor: Factor | None,
    update_times: UpdateTimes,
) -> Any:
    """Return a forward hook that records a layer's inputs, and its output gradients later."""
    has_bias = layer.bias is not None

    def record_output_gradient(gradient: Tensor) -> None:
        assert output_factor is not None
        output_gradients = layer.select_outputs(gradient.flatten(0, -2))
        _record_tokens(output_factor, output_gradients, update_times, appends_one=False)

    def record_call(
        _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor
    ) -> None:
        # A backward pass recomputes checkpointed blocks; their tokens are already recorded.
        is_backward = torch._C._current_graph_task_id() != -1
        if not output.requires_grad or is_backward:
            return
        if input_factor is not None:
            inputs = read_input(args, kwargs)
            _record_tokens(input_factor, inputs, update_times, appends_one=has_bias)
        if output_factor is not None:
            output.register_hook(record_output_gradient)

    return record_call


@torch.no_grad()
def _record_tokens(
    factor: Factor, vectors: Tensor, update_times: UpdateTimes, *, appends_one: bool
) -> None:
    """Record the tokens of one micro-batch in fp32, unseen by autocast and recomputation.

    Args:
        factor: Records the tokens.
        vectors: [..., size]; each vector is a token.
        update_times: Measures the recording.
        appends_one: Whether each vector gets a one at its end, the input of the bias.
    """
    # Autocast would multiply in bf16 or fp16, too coarse for sums over tokens.
    full_precision = torch.autocast(vectors.device.type, enabled=False)
    with (
        update_times.measure("factor", ends_update=False),
        full_precision,
        _hide_from_recomputation(),
    ):
        rows = vectors.detach().flatten(0, -2).float()
        if appends_one:
            rows = torch.cat([rows, rows.new_ones(len(rows), 1)], dim=1)
        factor.record(rows)


@contextlib.contextmanager
def _hide_from_recomputation() -> Iterator[None]:
    """Hide operations of a hook from selective recomputation, which does not repeat them.

    Recomputation reads the stored results in the order of the forward pass, and would mistake a
    result of the hook for a result of a layer.
    """
    if isinstance(_get_current_dispatch_mode(), _CachingTorchDispatchMode):
        with _pop_mode_temporarily():
            yield
    else:
        yield


@contextlib.contextmanager
def _hook_experts(experts: Any, hook_by_weight_name: dict[str, Any]) -> Iterator[None]:
    """Call a stack's hook after each product with one of its matrices inside the context.

    Args:
        experts: A module of transformers with stacks of matrices.
        hook_by_weight_name: The hooks, by the stack's name in the module.
    """
    original_forward, instance_forward = experts.forward, vars(experts).get("forward")

    def forward(*args: Any, **kwargs: Any) -> Any:
        implementation = experts.config._experts_implementation
        # Only the eager implementation calls torch's `linear` for each expert's matrix.
        experts.config._experts_implementation = "eager"
        try:
            # Look up the present tensors: FSDP gathers new ones for the forward pass.
            hook_by_stack = {
                experts.get_parameter(weight_name): hook
                for weight_name, hook in hook_by_weight_name.items()
            }
            with _LinearHooks(experts, hook_by_stack):
                return original_forward(*args, **kwargs)
        finally:
            experts.config._experts_implementation = implementation

    experts.forward = forward
    try:
        yield
    finally:
        del experts.forward
        if instance_forward is not None:
            experts.forward = instance_forward


class _LinearHooks(TorchFunctionMode):
    """Calls a stack's hook after each product with one of its matrices."""

    def __init__(self, experts: nn.Module, hook_by_stack: dict[Tensor, Any]) -> None:
        super().__init__()
        self._experts = experts
        self._hook_by_stack = hook_by_stack

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        if func is nn.functional.linear:
            # An expert's matrix is a view of its stack.
            hook = self._hook_by_stack.get(args[1]._base)
            if hook is not None:
                hook(self._experts, args[:1], {}, output)
        return output
