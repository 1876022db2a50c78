"""Options of the model: its architecture, and how it computes."""

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
        "Hub name or local folder with the model's configuration, tokenizer and weights. Without "
        "weights, the model is trained from scratch.",
        path=True,
    )
    config_name: str | None = option(
        None,
        "Hub name, folder or config.json of the model's configuration, if it differs from "
        "model_name_or_path. Without model_name_or_path the model is trained from scratch.",
        path=True,
    )
    model_type: str | None = option(
        None,
        "Architecture to train from scratch with its default configuration, such as gpt2 or llama.",
    )
    config_overrides: str | None = option(
        None, "Changes to the model's configuration, such as n_layer=4,n_embd=128."
    )
    model_size: str | None = option(
        None,
        "Size of a GPT-2- or Llama-shaped model, trained from scratch. 124M, 355M, 774M and 1.5B "
        "are the layers, width and heads of GPT-2; 1.7B, 3.6B, 7.5B, 18.4B, 39.1B, 76.1B, 145.6B "
        "and 310.1B those of Narayanan et al. 2021. For another number of parameters, such as 60M "
        "or 1B, the shape is computed, within 5 % of the number. Without a model's name it is a "
        "GPT-2 with the vocabulary and positions of that paper (51,200 and 2,048 from 1.7B on).",
    )
    num_layers: int | None = option(
        None,
        "Layers of a GPT-2- or Llama-shaped model, trained from scratch. Without a model's name it "
        "is a GPT-2 and also needs hidden_size and num_attention_heads.",
        at_least=1,
    )
    hidden_size: int | None = option(
        None, "Width of a GPT-2- or Llama-shaped model; the MLP keeps its ratio to it.", at_least=1
    )
    num_attention_heads: int | None = option(
        None,
        "Heads of a GPT-2- or Llama-shaped model; key-value heads keep their ratio.",
        at_least=1,
    )
    from_scratch: bool = option(
        False,
        "Take only configuration and tokenizer from model_name_or_path, and draw random weights on "
        "the device. The alias is llm-pytorch's name; it does not load pretrained weights with "
        "less memory.",
        aliases=("low_cpu_mem_usage",),
    )
    attention_implementation: str | None = option(
        None,
        "Attention kernel by transformers' name (eager, sdpa, flash_attention_2, ...); by default "
        "the best that the model supports. A kernel from the Hub (OWNER/NAME) also needs "
        "trust_remote_code.",
        resume="logged",
    )
    pad_vocab_to_multiple_of: int | None = option(
        None,
        "Pad the vocabulary of the embedding to a multiple of this, for speed. The padding does "
        "not affect the loss and is removed on export.",
        at_least=1,
        at_most=1_000_000,
    )
    z_loss: float = option(
        0.0,
        "Coefficient of the z-loss, the squared log-sum-exp of each token's logits, which keeps "
        "them from drifting (PaLM: 1e-4). It is logged separately and not part of the validation "
        "loss.",
        at_least=0,
    )
    router_dtype: Literal["fp32", "model"] | None = option(
        None,
        "Precision of the routers of a mixture of experts under mixed_precision: fp32, or as the "
        "rest of the model. By default fp32; a run that began without this option keeps model.",
    )
    no_bias: bool = option(False, "Keep all biases at zero.")
    trust_remote_code: bool = option(
        False,
        "Run model, tokenizer or data set code that comes with a Hub repository or a folder. "
        "Programs that read a run's folder take it only from their command line.",
        resume="free",
        widens_trust=True,
    )
    activation_checkpointing: Recomputation = option(
        "none",
        "Activations to recompute in the backward pass, to save memory: none; all of a block "
        "(full); or all except matrix products and attention (selective).",
        group=SPEED,
        resume="free",
    )
    torch_compile: bool | None = option(
        None,
        "Compile each block of the model with torch.compile, and compute the loss in a Triton "
        "kernel on a GPU. By default on CUDA GPUs with Triton and a C compiler, except with "
        "--deterministic.",
        group=SPEED,
        resume="logged",
    )
    fused_kernels: Literal["measured", "all"] = option(
        "measured",
        "Kernels of compiled runs on a GPU: those that ran on one before (measured), or also those "
        "that no GPU has run yet (all): few programs for the softmax of the loss, and fused "
        "backward passes of norms, GELU and biases.",
        group=SPEED,
        resume="logged",
    )


def model_problems(options: ModelOptions) -> list[str]:
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
    size_options = [name for name in SHAPE[1:] if getattr(options, name) is not None]
    if options.model_size is not None and size_options:
        problems.append(
            f"--model_size {options.model_size} sets --{size_options[0]} already; leave one of "
            "them out."
        )
    elif size_options and not model_name and len(size_options) < 3:
        missing_options = " and ".join(
            f"--{name}" for name in SHAPE[1:] if name not in size_options
        )
        problems.append(
            f"--{size_options[0]} changes a model that is named by --model_name_or_path, "
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


SHAPE = ("model_size", "num_layers", "hidden_size", "num_attention_heads")
"""Options that set the layers, width and heads of a model."""

ARCHITECTURE = ("config_name", "model_name_or_path", "model_type", "config_overrides", *SHAPE)
"""Options that describe the model's configuration."""


def shape_options(options: ModelOptions) -> list[str]:
    """Return the given options that set the layers, width and heads of a model."""
    return [name for name in SHAPE if getattr(options, name) is not None]
