"""Options of the model: its architecture, and how it computes."""

import ast
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from llm.config.duration import Tokens
from llm.config.options import option, option_group

SPEED = "Speed and memory"

Recomputation = Literal["none", "full", "selective"]


@option_group("Model", resume="fixed")
class ModelOptions:
    """The architecture of the model, its loss, and its speed."""

    REMOVED: ClassVar[Mapping[str, Any]] = dict.fromkeys(
        ("fused_gelu", "chunked_loss", "tied_gradients"), True
    )

    model_name_or_path: str | None = option(
        None,
        "Hub name or folder of the model, its tokenizer and weights.",
        path=True,
    )
    config_name: str | None = option(
        None,
        "Hub name, folder or config.json to replace the model's configuration; alone, it trains "
        "from scratch.",
        path=True,
    )
    model_type: str | None = option(
        None,
        "Architecture to train from scratch, such as gpt2 or llama.",
    )
    config_overrides: str | None = option(
        None, "Changes to the configuration, such as n_layer=4,n_embd=128."
    )
    model_size: str | None = option(
        None,
        "Parameters of a GPT-2- or Llama-shaped model (by default GPT-2) to train from scratch, "
        "such as 124M.",
    )
    num_layers: int | None = option(
        None,
        "Layers of a GPT-2- or Llama-shaped model to train from scratch.",
        at_least=1,
    )
    hidden_size: int | None = option(
        None, "Width of a GPT-2- or Llama-shaped model; the MLP keeps its ratio.", at_least=1
    )
    num_attention_heads: int | None = option(
        None,
        "Heads of a GPT-2- or Llama-shaped model; key-value heads keep their ratio.",
        at_least=1,
    )
    from_scratch: bool = option(
        False,
        "Draw random weights instead of reading the model's.",
        aliases=("low_cpu_mem_usage",),
    )
    attention_implementation: str | None = option(
        None,
        "Attention kernel of transformers, such as flash_attention_2, or OWNER/NAME of the Hub "
        "with trust_remote_code; by default the best.",
        resume="logged",
    )
    pad_vocab_to_multiple_of: int | None = option(
        None,
        "Pad the vocabulary to a multiple of this, except in the export.",
        at_least=1,
        at_most=1_000_000,
    )
    z_loss: float = option(
        0.0,
        "Coefficient of the z-loss, the squared log-sum-exp of the logits (PaLM: 1e-4), which "
        "evaluations leave out.",
        at_least=0,
    )
    router_dtype: Literal["fp32", "model"] | None = option(
        None,
        "Precision of routers: fp32, the default, or model, as the rest.",
    )
    no_bias: bool = option(False, "Keep all biases at zero.")
    trust_remote_code: bool = option(
        False,
        "Run Python code that comes with a model, tokenizer or data set.",
        resume="free",
        widens_trust=True,
    )
    activation_checkpointing: Recomputation = option(
        "none",
        "Activations to recompute in the backward pass: none, full, or selective (all except "
        "matrix products and attention).",
        group=SPEED,
        resume="free",
    )
    torch_compile: bool | None = option(
        None,
        "Compile each block; by default on CUDA GPUs with Triton and a C compiler, unless "
        "deterministic.",
        group=SPEED,
        resume="logged",
    )
    fused_kernels: Literal["measured", "all"] = option(
        "measured",
        "Kernels of compiled runs: measured, those that ran on a GPU before, or all.",
        group=SPEED,
        resume="logged",
    )


def find_model_problems(options: ModelOptions) -> list[str]:
    """Return faults of the model options, one sentence each."""
    problems = []
    model_name = options.model_name_or_path or options.config_name or options.model_type
    if not model_name and not shape_options(options):
        problems.append(
            "Name the model with --model_name_or_path, --config_name, --model_type or --model_size."
        )
    elif options.model_name_or_path is not None and options.model_type is not None:
        problems.append(
            "--model_type uses an architecture's defaults and --model_name_or_path a model; give "
            "one of them."
        )
    if is_hub_kernel(options.attention_implementation) and not options.trust_remote_code:
        problems.append(
            f"--attention_implementation {options.attention_implementation} is code from the "
            "Hugging Face Hub: add --trust_remote_code to this command if you trust its authors."
        )
    if options.model_size is not None and not _is_size(options.model_size):
        problems.append(
            f"--model_size {options.model_size} is not a number of parameters such as 60M or 1.3B."
        )
    number_options = [name for name in _SHAPE_NUMBERS if getattr(options, name) is not None]
    if options.model_size is not None and number_options:
        problems.append(
            f"--model_size {options.model_size} sets --{number_options[0]} already; leave one of "
            "them out."
        )
    elif number_options and not model_name and len(number_options) < len(_SHAPE_NUMBERS):
        missing_options = " and ".join(
            f"--{name}" for name in _SHAPE_NUMBERS if name not in number_options
        )
        problems.append(
            f"--{number_options[0]} changes a model that is named by --model_name_or_path, "
            f"--config_name or --model_type; without one, give {missing_options} too."
        )
    return problems


def _is_size(text: str) -> bool:
    """Return whether a text is a number of parameters, such as 60M."""
    try:
        return Tokens(text) > 0
    except ValueError:
        return False


def is_hub_kernel(name: str | None) -> bool:
    """Return whether transformers downloads the attention kernel of this name from the Hub."""
    return name is not None and "/" in name


def parse_literal(text: str) -> Any:
    """Return a value of `config_overrides` as a Python literal, or else as text."""
    constants = {"true": True, "false": False, "none": None}
    if text.lower() in constants:
        return constants[text.lower()]
    try:
        return ast.literal_eval(text)
    except (SyntaxError, ValueError):
        return text


_SHAPE_NUMBERS = ("num_layers", "hidden_size", "num_attention_heads")
SHAPE_OPTIONS = ("model_size", *_SHAPE_NUMBERS)
"""Options that set the layers, width and heads of a model."""

ARCHITECTURE_OPTIONS = (
    "config_name",
    "model_name_or_path",
    "model_type",
    "config_overrides",
    *SHAPE_OPTIONS,
)
"""Options that describe the model's configuration."""


def shape_options(options: ModelOptions) -> list[str]:
    """Return the given options that set the layers, width and heads of a model."""
    return [name for name in SHAPE_OPTIONS if getattr(options, name) is not None]
