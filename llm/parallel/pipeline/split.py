"""Find the modules that hold a model's parameters, in order, and assign them to stages."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from llm.errors import ConfigError, one_line
from llm.models.attention import evaluation_mode, random_tokens, run_model
from llm.models.patches.experts import experts_on_meta
from llm.models.sizes import find_blocks

_LOOKUP_COST = 0.1
"""Cost of a weight in a lookup, relative to one in a matrix product."""

SAMPLE_SHAPE = (2, 8)
"""Shape of the token ids that models are tested with, [samples, tokens]."""


@dataclass(frozen=True)
class PipelineModules:
    """The modules of a model that hold parameters, in the order of a forward.

    Attributes:
        prologue: Before the first layer, such as the embeddings.
        layers: The layers.
        epilogue: After the last layer, such as the last norm and the output head.
        tuple_lengths: For each layer, the length of the tuple that it returns; 0 for a bare tensor.
    """

    prologue: tuple[nn.Module, ...]
    layers: tuple[nn.Module, ...]
    epilogue: tuple[nn.Module, ...]
    tuple_lengths: tuple[int, ...]

    def of_stage(self, layers: range) -> list[nn.Module]:
        """Return the modules of a stage with these layers, and with the ends of the model."""
        prologue = self.prologue if layers.start == 0 else ()
        epilogue = self.epilogue if layers.stop == len(self.layers) else ()
        return [*prologue, *self.layers[layers.start : layers.stop], *epilogue]

    def assign_layers(self, num_stages: int) -> list[range]:
        """Return the layers of each stage so that the slowest stage is as fast as possible.

        The cost of a module is its number of weights; a lookup costs next to nothing.
        """
        return assign_layers(
            [num_parameters([layer]) for layer in self.layers],
            prologue_cost=_LOOKUP_COST * num_parameters(self.prologue),
            epilogue_cost=num_parameters(self.epilogue),
            num_stages=num_stages,
        )


def num_parameters(modules: Sequence[nn.Module]) -> int:
    """Return the number of parameters of some modules; shared ones count once."""
    return sum(p.numel() for p in {p for module in modules for p in module.parameters()})


def assign_layers(
    costs: Sequence[float], *, prologue_cost: float, epilogue_cost: float, num_stages: int
) -> list[range]:
    """Assign layers to stages: minimize the highest cost, then the sum of squares.

    Args:
        costs: Cost of each layer.
        prologue_cost: Further computation of the first stage.
        epilogue_cost: Further computation of the last stage.
        num_stages: No more than layers.
    """
    # The cost of all that comes before layer n, with the prologue if n > 0.
    cost_before = [0.0, *itertools.accumulate(costs, initial=prologue_cost)]
    del cost_before[1]
    cost_before[-1] += epilogue_cost
    num_layers = len(costs)
    # The best cut of the layers before end_layer into the stages so far, by end_layer.
    best_cut = {0: _Cut(highest_cost=0.0, sum_of_squares=0.0, borders=(0,))}
    for num_cut_stages in range(1, num_stages + 1):
        next_best_cut = {}
        # Leave one layer at least for each later stage.
        last_end_layer = num_layers - (num_stages - num_cut_stages)
        for end_layer in range(num_cut_stages, last_end_layer + 1):
            next_best_cut[end_layer] = min(
                cut.add_stage(end_layer, cost_before[end_layer] - cost_before[start_layer])
                for start_layer, cut in best_cut.items()
                if start_layer < end_layer
            )
        best_cut = next_best_cut
    borders = best_cut[num_layers].borders
    return [range(start_layer, end_layer) for start_layer, end_layer in itertools.pairwise(borders)]


class _Cut(NamedTuple):
    """A cut of the first layers into stages; the smallest tuple is the best cut.

    Attributes:
        highest_cost: Cost of the slowest stage.
        sum_of_squares: Sum of the squares of the stages' costs.
        borders: First layer of each stage, and the layer after the last stage.
    """

    highest_cost: float
    sum_of_squares: float
    borders: tuple[int, ...]

    def add_stage(self, end_layer: int, stage_cost: float) -> "_Cut":
        """Return the cut with a further stage, of the layers up to `end_layer`."""
        return _Cut(
            max(self.highest_cost, stage_cost),
            self.sum_of_squares + stage_cost**2,
            (*self.borders, end_layer),
        )


@torch.no_grad()
def find_pipeline_modules(model: PreTrainedModel) -> PipelineModules:
    """Find the order of a model's parameters in use, by a forward of a few tokens.

    Args:
        model: A causal language model on any device, also the meta device.

    Raises:
        ConfigError: It is not a sequence of layers with modules before and after.
    """
    try:
        layers = list(find_blocks(model))
    except ValueError as error:
        raise cut_error(model, str(error)) from error
    layer_modules = {module for layer in layers for module in layer.modules()}
    outer_modules = _find_outer_modules(model, layer_modules)
    calls, tuple_lengths = _trace_calls(model, [*outer_modules, *layers])
    layer_calls = [module for module in calls if module in set(layers)]
    if layer_calls != layers:
        raise cut_error(model, "it does not use its layers in sequence")
    first_call, last_call = calls.index(layers[0]), calls.index(layers[-1])
    epilogue = {module for module in calls[last_call:] if module not in layer_modules}
    prologue = [module for module in outer_modules if module not in epilogue]
    is_epilogue_used_early = not epilogue.isdisjoint(calls[:first_call])
    is_used_between_layers = not set(outer_modules).isdisjoint(calls[first_call:last_call])
    if is_epilogue_used_early or is_used_between_layers:
        raise cut_error(model, "it uses other parameters between its layers")
    return PipelineModules(
        prologue=tuple(prologue),
        layers=tuple(layers),
        epilogue=tuple(module for module in outer_modules if module in epilogue),
        tuple_lengths=tuple(tuple_lengths[layer] for layer in layers),
    )


def _find_outer_modules(model: PreTrainedModel, layer_modules: set[nn.Module]) -> list[nn.Module]:
    """Return the modules outside of the layers that hold parameters, which must be leaves."""
    outer_modules = [
        module
        for module in model.modules()
        if module not in layer_modules and next(module.parameters(recurse=False), None) is not None
    ]
    if any(next(module.children(), None) is not None for module in outer_modules):
        raise cut_error(
            model, "it has parameters outside of its layers that are not in a separate module"
        )
    return outer_modules


def _trace_calls(
    model: PreTrainedModel, modules: Sequence[nn.Module]
) -> tuple[list[nn.Module], dict[nn.Module, int]]:
    """Return the calls of some modules in a forward, and the length of the tuple of each."""
    calls: list[nn.Module] = []
    tuple_lengths: dict[nn.Module, int] = {}

    def record_call(module: nn.Module, _: Any, output: Any) -> None:
        calls.append(module)
        tuple_lengths[module] = len(output) if isinstance(output, tuple) else 0

    hooks = [module.register_forward_hook(record_call) for module in modules]
    try:
        with evaluation_mode(model), experts_on_meta(model):
            run_model(model, random_tokens(model, *SAMPLE_SHAPE), None, None)
    except Exception as error:
        raise cut_error(model, one_line(error)) from error
    finally:
        for hook in hooks:
            hook.remove()
    return calls, tuple_lengths


def cut_error(model: PreTrainedModel, reason: str) -> ConfigError:
    """Return the error for a model that cannot be divided into stages."""
    return ConfigError(
        f"--pipeline_parallel_size cannot cut {model.config.model_type} into stages "
        f"({reason.rstrip('.')}); divide it with --data_parallel_shard_size."
    )
