"""The modules of a model that hold its parameters, in order, and how stages share them out."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from llm.errors import ConfigError
from llm.models.configuration import one_line
from llm.models.masking import run_model
from llm.models.sizes import find_blocks

_LOOKUP_COST = 0.1
"""Of a weight that is looked up, as a share of one that is multiplied with."""


@dataclass(frozen=True)
class PipelineModules:
    """The modules of a model that hold parameters, in the order in which a forward meets them.

    Attributes:
        before: Before the first layer, such as the embeddings.
        layers: The layers.
        after: After the last layer, such as the last norm and the output head.
        lengths: For each layer, how many values it returns in a tuple; 0 for a bare tensor.
    """

    before: tuple[nn.Module, ...]
    layers: tuple[nn.Module, ...]
    after: tuple[nn.Module, ...]
    lengths: tuple[int, ...]

    def of(self, layers: range) -> list[nn.Module]:
        """The modules of a stage that has these layers, and what lies at the model's ends."""
        before = self.before if layers.start == 0 else ()
        after = self.after if layers.stop == len(self.layers) else ()
        return [*before, *self.layers[layers.start : layers.stop], *after]

    def assign_layers(self, num_stages: int) -> list[range]:
        """The layers of each stage, so that the one that takes longest takes as short as it can.

        A weight counts as the product that it takes part in; a lookup costs next to nothing.
        """
        return assign_layers(
            [num_parameters([layer]) for layer in self.layers],
            first=_LOOKUP_COST * num_parameters(self.before),
            last=num_parameters(self.after),
            num_stages=num_stages,
        )


def num_parameters(modules: Sequence[nn.Module]) -> int:
    """Numbers in the parameters of some modules; what they share counts once."""
    return sum(p.numel() for p in {p for module in modules for p in module.parameters()})


def assign_layers(
    costs: Sequence[float], *, first: float, last: float, num_stages: int
) -> list[range]:
    """Cut a row of layers where the dearest stage is cheapest, and the others are alike.

    Args:
        costs: Of each layer.
        first: What the first stage has to do besides.
        last: What the last stage has to do besides.
        num_stages: No more than layers.
    """
    total = [first, *itertools.accumulate(costs, initial=first)][1:]
    total = [0.0, *total[1:]]  # the first stage begins at no cost at all
    total[-1] += last
    num_layers = len(costs)
    # best[stop]: dearest stage, sum of squares and cuts of the layers before `stop`.
    best: dict[int, tuple[float, float, tuple[int, ...]]] = {0: (0.0, 0.0, (0,))}
    for stage in range(1, num_stages + 1):
        found = {}
        for stop in range(stage, num_layers - (num_stages - stage) + 1):
            found[stop] = min(
                (max(dearest, cost), squares + cost**2, (*cuts, stop))
                for start, (dearest, squares, cuts) in best.items()
                if start < stop
                for cost in [total[stop] - total[start]]
            )
        best = found
    return list(itertools.starmap(range, itertools.pairwise(best[num_layers][2])))


@torch.no_grad()
def find_pipeline_modules(model: PreTrainedModel) -> PipelineModules:
    """Find out, by one forward of a few tokens, in which order a model uses its parameters.

    Args:
        model: A causal language model; on the meta device too.

    Raises:
        ConfigError: It is not a row of layers with something before and after.
    """
    try:
        layers = list(find_blocks(model))
    except ValueError as error:
        raise cannot_cut(model, str(error)) from error
    inside = {module for layer in layers for module in layer.modules()}
    owners = [
        module
        for module in model.modules()
        if module not in inside and any(True for _ in module.parameters(recurse=False))
    ]
    if any(True for owner in owners for _ in owner.children()):
        raise cannot_cut(model, "it has parameters beside its layers that no module has alone")
    calls, lengths = _trace(model, [*owners, *layers])
    if [module for module in calls if module in set(layers)] != layers:
        raise cannot_cut(model, "it does not use its layers one after the other")
    first, last = calls.index(layers[0]), calls.index(layers[-1])
    after = {module for module in calls[last:] if module not in inside}
    before = [module for module in owners if module not in after]
    if after.intersection(calls[:first]) or set(calls[first:last]).intersection(owners):
        raise cannot_cut(model, "it uses other parameters between its layers")
    return PipelineModules(
        before=tuple(before),
        layers=tuple(layers),
        after=tuple(module for module in owners if module in after),
        lengths=tuple(lengths[layer] for layer in layers),
    )


def _trace(
    model: PreTrainedModel, modules: Sequence[nn.Module]
) -> tuple[list[nn.Module], dict[nn.Module, int]]:
    """The calls of some modules in a forward, and for each how long a tuple it returns."""
    calls: list[nn.Module] = []
    lengths: dict[nn.Module, int] = {}

    def note(module: nn.Module, _: Any, output: Any) -> None:
        calls.append(module)
        lengths[module] = len(output) if isinstance(output, tuple) else 0

    hooks = [module.register_forward_hook(note) for module in modules]
    training = model.training
    model.eval()
    try:
        run_model(model, some_tokens(model), None, None)
    except Exception as error:
        raise cannot_cut(model, one_line(error)) from error
    finally:
        model.train(training)
        for hook in hooks:
            hook.remove()
    return calls, lengths


def some_tokens(model: PreTrainedModel) -> torch.Tensor:
    """[2, 8] of ids, always the same, where the model is."""
    generator = torch.Generator().manual_seed(0)
    vocab_size = model.config.get_text_config().vocab_size
    return torch.randint(vocab_size, (2, 8), generator=generator).to(model.device)


def cannot_cut(model: PreTrainedModel, reason: str) -> ConfigError:
    """The refusal of a model that is no row of layers."""
    return ConfigError(
        f"--pipeline_parallel_size cannot cut {model.config.model_type} into stages "
        f"({reason.rstrip('.')}); divide it with --data_parallel_shard_size."
    )
