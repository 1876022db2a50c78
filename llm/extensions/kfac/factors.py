"""The factors A and G of K-FAC: hooks that record a step's tokens, and moving averages."""

import contextlib
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, Literal

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
        owned: Whether this rank keeps the average.
        used: Whether this rank keeps the bases.

    Attributes:
        sums: Decayed sum of x x^T of each block, fp32; empty if not owned.
        count: Decayed number of tokens, an fp32 scalar.
        bases: For each block, the eigenvectors of its average at the last decomposition, in
            columns; empty if not used.
        values: For each block, the eigenvalues of these eigenvectors.
        widths: The blocks' widths.
    """

    def __init__(
        self,
        name: str,
        *,
        size: int,
        max_dim: int,
        device: torch.device,
        owned: bool = True,
        used: bool = True,
    ) -> None:
        self.name = name
        self.size = size
        self.owned = owned
        self.device = device
        self.widths = block_widths(size, max_dim)
        block_widths_here = self.widths if used else []
        self.bases = [torch.eye(w, device=device) for w in block_widths_here]
        self.values = [torch.ones(w, device=device) for w in block_widths_here]
        block_widths_here = self.widths if owned else []
        self.sums = [torch.zeros(w, w, device=device) for w in block_widths_here]
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
        products = [gram(block) for block in rows.split(self.widths, dim=1)]
        # The trace of x x^T bounds all its entries, so one scalar tells whether all are finite.
        finite = torch.isfinite(torch.stack([product.trace() for product in products]).sum())
        for total, product in zip(self._step_sums, products, strict=True):
            total += torch.where(finite, product, 0.0)
        self._step_count += finite * len(rows)

    def drain(self) -> tuple[list[Tensor], Tensor]:
        """Return and reset the recorded sums of x x^T by block and number of tokens."""
        recorded = self._step_sums or self._zero_blocks(), self._step_count
        self.discard()
        return recorded

    def discard(self) -> None:
        """Discard the records since the last `drain`."""
        if self._step_sums is not None:
            self._step_sums, self._step_count = None, torch.zeros_like(self._step_count)

    def _zero_blocks(self) -> list[Tensor]:
        return [torch.zeros(w, w, device=self.device) for w in self.widths]

    def commit(
        self,
        step_sums: list[Tensor],
        step_count: Tensor,
        *,
        decay: float,
        scale: Tensor | float = 1.0,
        keep: Tensor | float = 1.0,
    ) -> None:
        """Update the average with the tokens of a step.

        Args:
            step_sums: Sums of x x^T by block, of all ranks; see `drain`.
            step_count: Number of tokens.
            decay: Decay of the average.
            scale: Factor on x x^T.
            keep: 1, or 0 to leave the average unchanged; a tensor is read on the device.
        """
        # Without tokens, for example if the router did not choose an expert, the average stays.
        keep = keep * (step_count > 0)
        old = 1 - (1 - decay) * keep
        for total, step in zip(self.sums, step_sums, strict=True):
            total.mul_(old).add_(step * (scale * keep))
        self.count.mul_(old).add_(step_count * keep)

    def averages(self) -> list[Tensor]:
        """Return the average of each block; zeros before the first token."""
        return [total / self.count.clamp_min(1e-30) for total in self.sums]

    def tensors(self) -> dict[str, Tensor]:
        """Return the live tensors that this rank keeps, by their keys in a checkpoint."""
        tensors = {"count": self.count} if self.owned else {}
        for key, blocks in (("sum", self.sums), ("basis", self.bases), ("values", self.values)):
            tensors |= {f"{key}.{i}": block for i, block in enumerate(blocks)}
        return tensors


def gram(rows: Tensor) -> Tensor:
    """Return rows^T @ rows, exactly symmetric; computes little more than half of a wide product.

    Args:
        rows: [tokens, size].
    """
    size = rows.shape[1]
    product = rows.new_empty(size, size)
    # Four bands from the diagonal on, mirrored; for a small matrix, a single product is as fast.
    band = size if size <= 256 else -(-size // 4)
    for start in range(0, size, band):
        stop = start + band
        product[start:stop, start:] = rows[:, start:stop].T @ rows[:, start:]
        product[stop:, start:stop] = product[start:stop, stop:].T
        # On some processors, kernels round the entries (i, j) and (j, i) differently.
        square = product[start:stop, start:stop]
        square.copy_(square.tril() + square.tril(-1).T)
    return product


def block_widths(size: int, max_dim: int) -> list[int]:
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
        self._updates: Counter[str] = Counter()

    @contextlib.contextmanager
    def measure(self, update: Literal["factor", "inv"], *, ends: bool = True) -> Iterator[None]:
        """Add the time of the block to an update.

        Args:
            update: Kind of update: averages or bases.
            ends: Whether the step's update ends with this block, so that it is counted.
        """
        began = time.perf_counter()
        yield
        self._seconds[update] += time.perf_counter() - began  # type: ignore[assignment]
        if ends:
            self._updates[update] += 1

    def take(self) -> dict[str, Tensor]:
        """Return and reset `factor_update_ms` and `inv_update_ms`, the means over updates.

        Kinds of updates that did not happen since the last call are left out.
        """
        means = {
            f"{update}_update_ms": torch.tensor(1000 * self._seconds[update] / number)
            for update, number in self._updates.items()
        }
        self._seconds.clear()
        self._updates.clear()
        return means


@contextlib.contextmanager
def record_layers(
    layers: Iterable[tuple[Layer, Factor | None, Factor | None]], times: UpdateTimes
) -> Iterator[None]:
    """Record the tokens of all forward passes in the context; their backward belongs there too.

    All leading dimensions are flattened: each position of each sequence is a separate token
    ("expand" of Eschenhagen et al. 2023, arXiv:2311.00636). Positions with an ignored label count
    too: they add their input to A, but little to G, because they have no loss. Sums and counts do
    not depend on how a step's tokens are split into micro-batches or over ranks.

    Args:
        layers: Each layer with the factor A of its inputs and the factor G of its output gradients,
            or None if not recorded.
        times: Measures the hooks.
    """
    stacks: dict[nn.Module, dict[str, Any]] = {}
    with contextlib.ExitStack() as contexts:
        for layer, inputs, outputs in layers:
            hook = _make_hook(layer, inputs, outputs, times)
            if layer.is_stack:
                stacks.setdefault(layer.module, {})[layer.leaf] = hook
            else:
                handle = layer.module.register_forward_hook(hook, with_kwargs=True)
                contexts.callback(handle.remove)
        for module, hooks in stacks.items():
            contexts.enter_context(_hooked_experts(module, hooks))
        # Compiled graphs do not support these hooks, so the model runs uncompiled.
        contexts.enter_context(torch.compiler.set_stance("force_eager"))
        yield


def _make_hook(
    layer: Layer, inputs: Factor | None, outputs: Factor | None, times: UpdateTimes
) -> Any:
    has_bias = layer.bias is not None

    @torch.no_grad()
    def record(factor: Factor, values: Tensor, *, with_one: bool) -> None:
        # Autocast would multiply in bf16 or fp16, too coarse for sums over tokens.
        off = torch.autocast(values.device.type, enabled=False)
        with times.measure("factor", ends=False), off, _hidden_from_recomputation():
            rows = values.detach().flatten(0, -2).float()
            if with_one:
                rows = torch.cat([rows, rows.new_ones(len(rows), 1)], dim=1)
            factor.record(rows)

    def record_outputs(gradient: Tensor) -> None:
        assert outputs is not None
        record(outputs, layer.own_outputs(gradient.flatten(0, -2)), with_one=False)

    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor) -> None:
        # A backward pass recomputes checkpointed blocks; their tokens are already recorded.
        if not out.requires_grad or torch._C._current_graph_task_id() != -1:
            return
        if inputs is not None:
            record(inputs, read_input(args, kwargs), with_one=has_bias)
        if outputs is not None:
            out.register_hook(record_outputs)

    return hook


@contextlib.contextmanager
def _hidden_from_recomputation() -> Iterator[None]:
    """Hide what a hook computes in a block's forward pass, because no backward pass repeats it.

    Selective recomputation reads the kept results in the order of the forward pass, and would
    mistake a result of the hook for a result of a layer.
    """
    if isinstance(_get_current_dispatch_mode(), _CachingTorchDispatchMode):
        with _pop_mode_temporarily():
            yield
    else:
        yield


@contextlib.contextmanager
def _hooked_experts(experts: Any, hooks: dict[str, Any]) -> Iterator[None]:
    """Call hooks after each product with a matrix of a stack, like after a layer's forward.

    Args:
        experts: A module of transformers with stacks of matrices.
        hooks: By the stack's name in the module.
    """
    original, instance_forward = experts.forward, vars(experts).get("forward")

    def forward(*args: Any, **kwargs: Any) -> Any:
        chosen = experts.config._experts_implementation
        # Only the eager implementation calls torch's `linear` for each expert's matrix.
        experts.config._experts_implementation = "eager"
        try:
            # Look up the present tensors: FSDP gathers new ones for the forward pass.
            stacks = {experts.get_parameter(leaf): hook for leaf, hook in hooks.items()}
            with _LinearHooks(experts, stacks):
                return original(*args, **kwargs)
        finally:
            experts.config._experts_implementation = chosen

    experts.forward = forward
    try:
        yield
    finally:
        del experts.forward
        if instance_forward is not None:
            experts.forward = instance_forward


class _LinearHooks(TorchFunctionMode):
    """Calls a stack's hook after each product with one of its matrices."""

    def __init__(self, experts: nn.Module, hooks: dict[Tensor, Any]) -> None:
        super().__init__()
        self._experts = experts
        self._hooks = hooks

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is nn.functional.linear:
            # An expert's matrix is a view of its stack.
            hook = self._hooks.get(args[1]._base)
            if hook is not None:
                hook(self._experts, args[:1], {}, out)
        return out
