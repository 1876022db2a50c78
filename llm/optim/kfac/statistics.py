"""Hooks that gather a a^T and g g^T while a step is computed, and are gone otherwise."""

import contextlib
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from llm.optim.kfac.factors import Factor
from llm.optim.kfac.layers import Layer, read_input
from llm.optim.kfac.update_times import UpdateTimes


class Statistics:
    """Records the covered layers' inputs and output gradients into their factors.

    All leading dimensions are flattened: each position of each sequence is a token of its own
    ("expand" of Eschenhagen et al. 2023, arXiv:2311.00636). Every position counts, also one whose
    label is ignored: it adds its input to A and, since its loss is none, little to G. Sums and
    counts do not depend on how a step's tokens are split into micro-batches or over ranks.

    Args:
        layers: The covered layers.
        input_factors: The factor A of each layer, by its name; layers may share one.
        output_factors: The factor G of each layer, by its name.
        times: Is told how long it takes.
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        *,
        input_factors: dict[str, Factor],
        output_factors: dict[str, Factor],
        times: UpdateTimes,
    ) -> None:
        self._layers = layers
        self._input_factors = input_factors
        self._output_factors = output_factors
        self._times = times

    @contextlib.contextmanager
    def capture_stats(self, factors: Collection[Factor]) -> Iterator[None]:
        """Record all that is computed inside; every forward there needs its backward there.

        Compiled models run uncompiled meanwhile, since their graphs have no place for hooks.

        Args:
            factors: Those to record into.
        """
        stacks: dict[nn.Module, dict[Tensor, Any]] = {}
        with contextlib.ExitStack() as to_undo:
            for layer in self._layers:
                hook = self._make_hook(layer, factors)
                if hook is None:
                    continue
                if layer.is_stack:
                    stacks.setdefault(layer.module, {})[layer.weight] = hook
                else:
                    handle = layer.module.register_forward_hook(hook, with_kwargs=True)
                    to_undo.callback(handle.remove)
            for module, hooks in stacks.items():
                to_undo.enter_context(_watched(module, hooks))
            to_undo.enter_context(torch.compiler.set_stance("force_eager"))
            yield

    def _make_hook(self, layer: Layer, factors: Collection[Factor]) -> Any:
        """What to call after a layer's forward; None if nothing of it is recorded."""
        inputs, outputs = self._input_factors[layer.name], self._output_factors[layer.name]
        # Layers with a common input count it once.
        wants_input = inputs in factors and layer.input_name == layer.name
        wants_output = outputs in factors
        if not (wants_input or wants_output):
            return None
        has_bias = layer.bias is not None

        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor) -> None:
            # Inside a backward, this is a checkpointed block computed once more: seen before.
            if not out.requires_grad or torch._C._current_graph_task_id() != -1:
                return
            if wants_input:
                self._record(inputs, read_input(args, kwargs), with_one=has_bias)
            if wants_output:
                out.register_hook(lambda gradient: self._record(outputs, gradient, with_one=False))

        return hook

    @torch.no_grad()
    def _record(self, factor: Factor, values: Tensor, *, with_one: bool) -> None:
        device_type = values.device.type
        with self._times.measure("factor"), torch.autocast(device_type, enabled=False):
            rows = values.detach().flatten(0, -2).float()
            if with_one:
                rows = torch.cat([rows, rows.new_ones(len(rows), 1)], dim=1)
            factor.record(rows)


@contextlib.contextmanager
def _watched(experts: Any, hooks: dict[Tensor, Any]) -> Iterator[None]:
    """Call hooks after each product with a matrix of a stack, as after a layer's forward.

    Args:
        experts: A module of transformers with stacks of matrices.
        hooks: By stack.
    """
    original, own = experts.forward, vars(experts).get("forward")

    def forward(*args: Any, **kwargs: Any) -> Any:
        # The only way in which every product goes through torch's `linear`.
        chosen, experts.config._experts_implementation = (
            experts.config._experts_implementation,
            "eager",
        )
        try:
            with _Products(experts, hooks):
                return original(*args, **kwargs)
        finally:
            experts.config._experts_implementation = chosen

    experts.forward = forward
    try:
        yield
    finally:
        del experts.forward
        if own is not None:
            experts.forward = own


class _Products(TorchFunctionMode):
    """Sees products with the matrices of stacks."""

    def __init__(self, experts: nn.Module, hooks: dict[Tensor, Any]) -> None:
        super().__init__()
        self._experts = experts
        self._hooks = hooks

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is nn.functional.linear:
            hook = self._hooks.get(args[1]._base)
            if hook is not None:
                hook(self._experts, args[:1], {}, out)
        return out
