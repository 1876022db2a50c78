"""The coordinate check of muP: the size of activations in the first steps, by width.

`python -m benchmarks.coordinate_check --model_type gpt2 --mup --mup_base_width 64`

Exit codes: 0 on success; 2 if an option cannot work, or the picture cannot be written.

After Yang et al. 2022, arXiv:2203.03466, appendix D.1: with muP, the entries of an activation are
equally large in wide and narrow models at every step. Only the logits of an untrained model become
smaller.
"""

import dataclasses
import math
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from llm.config.command_line import parse_options
from llm.config.options import option, option_group
from llm.config.program import program
from llm.errors import ConfigError
from llm.runtime.world import ignore_ranks
from llm.trainers.gpt.config import find_planned_run_problems, read_preset_options
from llm.trainers.gpt.extensions import GPTConfig
from llm.trainers.gpt.seams import choose_factory, list_transforms, make_extensions

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import PreTrainedModel

_STEPS = 4
_SAMPLES = 4
_LENGTH = 64

Sizes = Mapping[int, Mapping[str, Sequence[float]]]
"""Mean absolute value before each step and after the last one, by width and kind of activation."""


@option_group("Coordinate check")
class CheckOptions(GPTConfig):
    """The model to check: any option of the trainer, and the widths."""

    COMMON: ClassVar[tuple[str, ...]] = (
        *("widths", "plot", "mup", "mup_base_width", "mup_base_num_layers", "mup_base_head_dim"),
        *("model_name_or_path", "model_size", "config_overrides", "optimizer", "learning_rate"),
    )

    widths: tuple[int, ...] = option(
        (), "Widths of the models; by default 1, 2, 4 and 8 times mup_base_width.", at_least=1
    )
    plot: str = option("coordinate_check.png", "PNG, PDF or SVG file for the picture.", path=True)


@program
def main(argv: Sequence[str]) -> int:
    """Run the program; return the exit code."""
    ignore_ranks()
    options = parse_options(
        CheckOptions,
        argv,
        prog="python -m benchmarks.coordinate_check",
        description="Train models of several widths for some steps, with and without --mup, and "
        "plot the sizes of their activations.",
        inherit=read_preset_options,
    )
    problems = find_planned_run_problems(options)
    if not options.mup:
        problems.append("The coordinate check is of --mup; give it, and --mup_base_width.")
    if problems:
        raise ConfigError(" ".join(problems))
    _check_plot(options.plot)
    from llm.runtime.logging import quiet_libraries
    from llm.runtime.process_settings import limit_spin_wait, use_private_compile_cache

    limit_spin_wait()
    use_private_compile_cache()
    quiet_libraries()
    sys.stdout.write("\n".join(coordinate_check(options)) + "\n")
    return 0


def _check_plot(path: str) -> None:
    if Path(path).suffix.lower() not in (".png", ".pdf", ".svg"):
        raise ConfigError(f"--plot {path} must end in .png, .pdf or .svg.")
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            "The picture needs matplotlib: pip install matplotlib, which comes with the extra "
            "`report`."
        ) from error


def coordinate_check(options: CheckOptions) -> list[str]:
    """Train models of several widths with and without muP, and plot the sizes of activations.

    Returns:
        The lines of a table.

    Raises:
        ConfigError: A width does not fit the model, or the picture cannot be written.
    """
    base = options.mup_base_width
    assert base is not None  # --mup needs it
    widths = options.widths or tuple(factor * base for factor in (1, 2, 4, 8))
    if len(widths) < 2 or sorted(set(widths)) != [*widths]:
        raise ConfigError("--widths takes two or more widths in ascending order.")
    sizes_by_title = {
        title: {width: activation_sizes(_resize_model(options, width, mup=mup)) for width in widths}
        for title, mup in (("without --mup", False), ("with --mup", True))
    }
    _plot_sizes(sizes_by_title, options.plot)
    return [*_format_table(sizes_by_title), f"drawn in {options.plot}"]


def _resize_model(options: CheckOptions, width: int, *, mup: bool) -> CheckOptions:
    """Return the options for another width, with everything else unchanged."""
    from llm.models.configuration import load_config
    from llm.models.sizes import head_width

    text_config = load_config(options).get_text_config()
    heads = text_config.num_attention_heads
    if options.mup_base_head_dim is None:  # the number of heads grows, not their width
        head_dim = head_width(text_config)
        heads, remainder = divmod(width, head_dim)
        if remainder or not heads:
            raise ConfigError(
                f"A model of width {width} cannot be divided into heads of {head_dim}; give other "
                "--widths, or fewer --num_attention_heads."
            )
    changes: dict[str, Any] = {
        "hidden_size": width,
        "num_attention_heads": heads,
        "mup": mup,
        "attention_implementation": None,
        "activation_checkpointing": "none",
    }
    return dataclasses.replace(options, **changes)


def activation_sizes(options: GPTConfig) -> dict[str, list[float]]:
    """Train a model from scratch on one batch of random tokens; return the sizes of activations.

    Args:
        options: The model, the optimizer and the seed.

    Returns:
        Mean absolute value before each step and after the last one, by kind of activation.
    """
    import torch

    from llm.models.build import build_model
    from llm.models.configuration import load_config, max_positions
    from llm.models.loss import LanguageModelLoss
    from llm.optim.groups import scale_learning_rates

    config = load_config(options)
    vocab_size = config.get_text_config().vocab_size
    transforms = list_transforms(make_extensions(options), config)
    model = build_model(
        options,
        config,
        weights_from=None,
        seed=options.seed or 0,
        device=torch.device("cpu"),
        vocab_size=vocab_size,
        transforms=transforms,
    ).eval()  # without dropout
    optimizer = (
        choose_factory(options, make_extensions(options), seed=0).make(model, None).optimizer
    )
    for transform in transforms:
        scale_learning_rates(optimizer, model, transform.rate_factor)
    loss = LanguageModelLoss(model, is_chunked=False)  # its logits are an activation of the head
    length = min(_LENGTH, max_positions(config) or _LENGTH)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(vocab_size, (_SAMPLES, length + 1), generator=generator)
    sizes: dict[str, list[float]] = defaultdict(list)
    for name, module in _observed_modules(model).items():
        module.register_forward_hook(_make_recorder(sizes[name]))
    for _ in range(_STEPS):
        objective, _ = loss(ids[:, :-1], ids[:, 1:])
        optimizer.zero_grad()
        (objective / (_SAMPLES * length)).backward()
        optimizer.step()
    with torch.no_grad():
        loss(ids[:, :-1], ids[:, 1:])
    return dict(sizes)


def _observed_modules(model: "PreTrainedModel") -> "dict[str, nn.Module]":
    """Return the modules to plot: first and last module, attention and MLP of the last block."""
    from llm.models.sizes import find_blocks

    branches = {
        name: module
        for name, module in find_blocks(model)[-1].named_children()
        if any(parameter.ndim == 2 for parameter in module.parameters())
    }
    ends = model.get_input_embeddings(), model.get_output_embeddings()
    return {"embedding": ends[0], **branches, "logits": ends[1]}


def _make_recorder(sizes: list[float]) -> "Callable[[nn.Module, Any, Any], None]":
    def record(module: "nn.Module", inputs: Any, output: Any) -> None:
        activation: Tensor = output[0] if isinstance(output, tuple) else output
        sizes.append(activation.detach().abs().mean().item())

    return record


def _format_table(sizes_by_title: Mapping[str, Sizes]) -> list[str]:
    """Tabulate the sizes after the last step, and their growth as a power of the width."""
    lines = [f"mean absolute value of activations after {_STEPS} steps, by width"]
    for title, sizes in sizes_by_title.items():
        widths = [*sizes]
        lines.append(f"{title:<16}" + "".join(f"{width:>10}" for width in widths) + "    grows as")
        for kind in sizes[widths[0]]:
            final_sizes = [sizes[width][kind][-1] for width in widths]
            power = math.log(final_sizes[-1] / final_sizes[0]) / math.log(widths[-1] / widths[0])
            figures = "".join(f"{value:>10.4g}" for value in final_sizes)
            lines.append(f"  {kind:<14}{figures}    width^{power:.2f}")
    return lines


def _plot_sizes(sizes_by_title: Mapping[str, Sizes], path: str) -> None:
    """Plot each kind of activation, without muP in the upper row and with it in the lower row."""
    from matplotlib import colormaps
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    kinds = [*next(iter(next(iter(sizes_by_title.values())).values()))]
    figure = Figure(figsize=(2.6 * len(kinds) + 1, 5.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(2, len(kinds), sharex=True, sharey=True, squeeze=False)
    colors = colormaps["viridis"].resampled(_STEPS + 2)
    for row, (title, sizes) in zip(axes, sizes_by_title.items(), strict=True):
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


if __name__ == "__main__":
    sys.exit(main())
