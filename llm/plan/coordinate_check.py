"""The coordinate check of muP: the size of activations in the first steps, by width.

After Yang et al. 2022, arXiv:2203.03466, appendix D.1: with muP, the entries of an activation are
equally large in wide and narrow models at every step. Only the logits of an untrained model become
smaller.
"""

import dataclasses
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from llm.config.options import given
from llm.errors import ConfigError
from llm.models.build import build_model
from llm.models.configuration import load_config, max_positions
from llm.models.loss import LanguageModelLoss
from llm.models.sizes import find_blocks, head_width
from llm.optim.groups import scale_learning_rates
from llm.optim.make import make_optimizer
from llm.plan import render
from llm.plan.options import PlanOptions
from llm.trainers.gpt.seams import optimizer_of, transforms_of

_STEPS = 4
_SAMPLES = 4
_LENGTH = 64

Sizes = Mapping[int, Mapping[str, Sequence[float]]]
"""Mean absolute value before each step and after the last one, by width and kind of activation."""


def coordinate_check(options: PlanOptions) -> list[str]:
    """Train models of several widths with and without muP, and plot the sizes of activations.

    Returns:
        The lines of a table.

    Raises:
        ConfigError: A width does not fit the model, or the picture cannot be written.
    """
    path = options.plot or "coordinate_check.png"
    render.check_plot(path)
    base = given(options)["mup_base_width"]  # --coordinate_check needs it
    widths = options.widths or tuple(factor * base for factor in (1, 2, 4, 8))
    if len(widths) < 2 or sorted(set(widths)) != [*widths]:
        raise ConfigError("--widths takes two or more widths in ascending order.")
    found = {
        title: {width: activation_sizes(_resized(options, width, mup=mup)) for width in widths}
        for title, mup in (("without --mup", False), ("with --mup", True))
    }
    _draw(found, path)
    return [*_table(found), f"drawn in {path}"]


def _resized(options: PlanOptions, width: int, *, mup: bool) -> PlanOptions:
    """Return the options for another width, with everything else unchanged."""
    text_config = load_config(options).get_text_config()
    heads = text_config.num_attention_heads
    if "mup_base_head_dim" not in given(options):  # the number of heads grows, not their width
        head_dim = head_width(text_config)
        heads, rest = divmod(width, head_dim)
        if rest or not heads:
            raise ConfigError(
                f"A model of width {width} cannot be divided into heads of {head_dim}; give other "
                "--widths, or fewer --num_attention_heads."
            )
    switch: dict[str, Any] = {"mup": mup}
    return dataclasses.replace(
        options,
        hidden_size=width,
        num_attention_heads=heads,
        **switch,
        attention_implementation=None,
        activation_checkpointing="none",
    )


def activation_sizes(options: PlanOptions) -> dict[str, list[float]]:
    """Train a model from scratch on one batch of random tokens; return the sizes of activations.

    Args:
        options: The model, the optimizer and the seed.

    Returns:
        Mean absolute value before each step and after the last one, by kind of activation.
    """
    config = load_config(options)
    vocab_size = config.get_text_config().vocab_size
    transforms = transforms_of(options, config)
    model = build_model(
        options,
        config,
        weights_from=None,
        seed=options.seed or 0,
        device=torch.device("cpu"),
        vocab_size=vocab_size,
        transforms=transforms,
    ).eval()  # without dropout
    optimizer = optimizer_of(options, model, seed=0) or make_optimizer(options, model)
    for transform in transforms:
        scale_learning_rates(optimizer, model, transform.rate_factor)
    loss = LanguageModelLoss(model, chunked=False)  # its logits are an activation of the head
    length = min(_LENGTH, max_positions(config) or _LENGTH)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(vocab_size, (_SAMPLES, length + 1), generator=generator)
    sizes: dict[str, list[float]] = defaultdict(list)
    for name, module in _observed(model).items():
        module.register_forward_hook(_recorder(sizes[name]))
    for _ in range(_STEPS):
        objective, _ = loss(ids[:, :-1], ids[:, 1:])
        optimizer.zero_grad()
        (objective / (_SAMPLES * length)).backward()
        optimizer.step()
    with torch.no_grad():
        loss(ids[:, :-1], ids[:, 1:])
    return dict(sizes)


def _observed(model: PreTrainedModel) -> dict[str, nn.Module]:
    """Return the modules to plot: first and last module, attention and MLP of the last block."""
    branches = {
        name: module
        for name, module in find_blocks(model)[-1].named_children()
        if any(parameter.ndim == 2 for parameter in module.parameters())
    }
    ends = model.get_input_embeddings(), model.get_output_embeddings()
    return {"embedding": ends[0], **branches, "logits": ends[1]}


def _recorder(sizes: list[float]) -> Callable[[nn.Module, Any, Any], None]:
    def record(module: nn.Module, inputs: Any, output: Any) -> None:
        activation: Tensor = output[0] if isinstance(output, tuple) else output
        sizes.append(activation.detach().abs().mean().item())

    return record


def _table(found: Mapping[str, Sizes]) -> list[str]:
    """Tabulate the sizes after the last step, and their growth as a power of the width."""
    lines = [f"mean absolute value of activations after {_STEPS} steps, by width"]
    for title, sizes in found.items():
        widths = [*sizes]
        lines.append(f"{title:<16}" + "".join(f"{width:>10}" for width in widths) + "    grows as")
        for kind in sizes[widths[0]]:
            last = [sizes[width][kind][-1] for width in widths]
            power = math.log(last[-1] / last[0]) / math.log(widths[-1] / widths[0])
            figures = "".join(f"{value:>10.4g}" for value in last)
            lines.append(f"  {kind:<14}{figures}    width^{power:.2f}")
    return lines


def _draw(found: Mapping[str, Sizes], path: str) -> None:
    """Plot each kind of activation, without muP in the upper row and with it in the lower row."""
    from matplotlib import colormaps
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    kinds = [*next(iter(next(iter(found.values())).values()))]
    figure = Figure(figsize=(2.6 * len(kinds) + 1, 5.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(2, len(kinds), sharex=True, sharey=True, squeeze=False)
    colors = colormaps["viridis"].resampled(_STEPS + 2)
    for row, (title, sizes) in zip(axes, found.items(), strict=True):
        row[0].set_ylabel(f"{title}\nmean absolute value")
        for axis, kind in zip(row, kinds, strict=True):
            for step in range(_STEPS + 1):
                values = [of_width[kind][step] for of_width in sizes.values()]
                label = f"{step} steps"
                axis.plot([*sizes], values, marker="o", color=colors(step), label=label)
            axis.set_xscale("log", base=2)
            axis.set_yscale("log", base=2)
            axis.set_xticks([*sizes], [str(width) for width in sizes])
    for axis, kind in zip(axes[0], kinds, strict=True):
        axis.set_title(kind)
    for axis in axes[1]:
        axis.set_xlabel("width")
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside right center")
    try:
        figure.savefig(path, dpi=120)
    except OSError as error:
        raise ConfigError(f"--plot {path} cannot be written: {error.strerror}.") from error
