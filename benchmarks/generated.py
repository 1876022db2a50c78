"""Count the bytes that the code generated for a block on a GPU reads and writes.

python -m benchmarks.generated [--models gpt2 llama] [--kernels] [--registers]

Needs Triton, but no GPU: Inductor generates its code for a made-up H100. `--registers` compiles the
project's Triton kernels for it, and lists their registers and what they spill.
"""

import importlib.util
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.measure import CaseFailed
from benchmarks.report import ReportOptions, Section, machine, render, run_benchmark, table
from llm.config.options import option
from llm.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import PreTrainedConfig, PreTrainedModel

    from benchmarks.made_up_gpu import GeneratedKernel


@dataclass(frozen=True)
class BlockShape:
    """A block and its batch.

    Attributes:
        model_type: The architecture.
        batch_size: Samples of a micro-batch.
        length: Tokens of a sample.
        config: Settings of the architecture.
    """

    model_type: str
    batch_size: int
    length: int
    config: Mapping[str, Any]

    def make_inputs(
        self, config: "PreTrainedConfig", device: str
    ) -> tuple["Tensor", dict[str, Any]]:
        """Return the block's first input, fp32 [batch, length, width], and further arguments."""
        import torch

        hidden = torch.randn(self.batch_size, self.length, config.hidden_size, device=device)
        arguments: dict[str, Any] = {"attention_mask": None, "use_cache": False}
        if self.model_type != "gpt2":
            head_width = config.hidden_size // config.num_attention_heads
            angles = torch.randn(1, self.length, head_width, device=device)
            arguments["position_embeddings"] = (angles.cos(), angles.sin())
        return hidden, arguments


SHAPES = {
    "gpt2": BlockShape(
        "gpt2", 64, 1024, {"n_layer": 1, "resid_pdrop": 0, "attn_pdrop": 0, "embd_pdrop": 0}
    ),
    "llama": BlockShape(
        "llama",
        8,
        2048,
        {
            "num_hidden_layers": 1,
            "hidden_size": 2048,
            "intermediate_size": 5632,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
        },
    ),
}
"""GPT-2 124M and TinyLlama 1.1B."""

VARIANTS = ("default", "biases and weights", "all")
"""Kernels of a block: those of a run by default; with fused gradients of biases, and gradients of
weights that products write in fp32; with these and fused backward passes of norms
(`--fused_kernels all`)."""


@dataclass(frozen=True, kw_only=True)
class GeneratedOptions(ReportOptions):
    """Options of the benchmark."""

    models: tuple[str, ...] = option((), f"Of {' and '.join(SHAPES)}; by default all.", group="Run")
    kernels: bool = option(False, "List each kernel of at least 1 MB.", group="Run")
    registers: bool = option(
        False, "Only compile the project's kernels, and list their registers.", group="Run"
    )


def make_model(
    shape: BlockShape, variant: str, *, attention: str
) -> tuple["PreTrainedModel", dict[str, Any]]:
    """Return a model of one block on the meta device, and the options of torch.compile for it.

    Args:
        shape: The block.
        variant: One of `VARIANTS`.
        attention: The attention kernel, by transformers' name.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from llm.models.attention import disable_packing_detection
    from llm.models.patches.gelu import fuse_gelu

    disable_packing_detection()
    config = AutoConfig.for_model(
        shape.model_type, vocab_size=512, bos_token_id=0, eos_token_id=0, **shape.config
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    fuse_gelu(model)
    if variant == "default":
        return model, {}
    from llm.models import fused_backward  # imports Triton

    fused_backward.fuse_gelu_backward(model)
    if variant == "all":
        fused_backward.fuse_norms(model)
    return model, fused_backward.inductor_options()


def count_block(shape: BlockShape, variant: str) -> list["GeneratedKernel"]:
    """Return the kernels of a block's forward and backward pass, in order.

    Args:
        shape: The block and its batch.
        variant: One of `VARIANTS`.
    """
    from transformers import AttentionInterface

    from benchmarks.made_up_gpu import generate_kernels
    from llm.models.sizes import find_blocks

    AttentionInterface.register("cudnn_attention", _cudnn_attention)
    model, compile_options = make_model(shape, variant, attention="cudnn_attention")
    block = find_blocks(model)[0].train()
    return generate_kernels(block, lambda: shape.make_inputs(model.config, "cpu"), compile_options)


def _cudnn_attention(
    module: "nn.Module",
    query: "Tensor",
    key: "Tensor",
    value: "Tensor",
    mask: None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **_: Any,
) -> tuple["Tensor", None]:
    """Compute causal attention by the operation that a GPU uses; the CPU would choose another."""
    import torch

    repeats = query.shape[1] // key.shape[1]
    if repeats > 1:
        key, value = (tensor.repeat_interleave(repeats, 1) for tensor in (key, value))
    attended: Tensor = torch.ops.aten._scaled_dot_product_cudnn_attention(
        query, key, value, None, True, dropout, True, False, scale=scaling
    )[0]
    return attended.transpose(1, 2).contiguous(), None


def megabytes(kernels: Sequence["GeneratedKernel"], *, is_backward: bool) -> int:
    """Return the megabytes of a pass that are neither products nor attention."""
    counts = [
        kernel.num_bytes
        for kernel in kernels
        if kernel.is_backward == is_backward and not kernel.is_library
    ]
    return round(sum(counts) / 1e6)


def report(options: GeneratedOptions, folder: Path) -> str:
    """Count all variants and return the report."""
    unknown_models = [name for name in options.models if name not in SHAPES]
    if unknown_models:
        raise ConfigError(f"--models {unknown_models[0]} is none of: {', '.join(SHAPES)}.")
    if importlib.util.find_spec("triton") is None:
        raise CaseFailed("Triton is missing: pip install triton")
    if options.registers:
        facts = [*machine(("torch", "triton")), "Kernels for sm_90a. Nothing ran on a GPU"]
        return render("Compiled kernels", facts, [_registers_section()])
    sections = []
    for name in options.models or SHAPES:
        shape = SHAPES[name]
        rows, lists = [], []
        for variant in VARIANTS:
            kernels = count_block(shape, variant)
            passes = [megabytes(kernels, is_backward=is_backward) for is_backward in (False, True)]
            rows.append([variant, *(f"{count:,}" for count in passes), str(len(kernels))])
            if options.kernels:
                lists += ["", f"{variant}:", "", *_kernel_table(kernels)]
        title = f"A block of {name}, {shape.batch_size} x {shape.length:,} tokens"
        header = ["kernels", "forward, MB", "backward, MB", "number"]
        sections.append(Section(title=title, lines=[*table(header, rows), *lists]))
    facts = [
        *machine(("torch", "triton", "transformers")),
        "Bytes that Inductor's kernels for sm_90 read and write at least, without matrix products "
        "and attention. Nothing ran on a GPU",
    ]
    return render("Generated code", facts, sections)


def _registers_section() -> Section:
    """Return the registers and the memory of the project's kernels.

    Raises:
        CaseFailed: Triton has no assembler.
    """
    from benchmarks.compiled_kernels import PTXAS, compile_launches, launches

    if not PTXAS.exists():
        raise CaseFailed(f"The assembler is missing: {PTXAS}")
    rows = [
        [
            f"{title} ({kernel.name.lstrip('_')})",
            *(str(kernel.num_warps), str(kernel.registers)),
            *(str(kernel.spilled_bytes), f"{kernel.shared_bytes:,}"),
        ]
        for title, launch in launches()
        for kernel in compile_launches(launch)
    ]
    header = ["kernel", "warps", "registers of a thread", "spilled bytes", "shared bytes"]
    return Section(title="Kernels", lines=table(header, rows))


def _kernel_table(kernels: Sequence["GeneratedKernel"]) -> list[str]:
    """Return a table of the kernels of at least 1 MB."""
    rows = [
        [
            "backward" if kernel.is_backward else "forward",
            f"{kernel.num_bytes / 1e6:,.0f}",
            "library" if kernel.is_library else "",
            ", ".join(kernel.operations),
        ]
        for kernel in kernels
        if kernel.num_bytes >= 1e6
    ]
    return table(["pass", "MB", "", "operations"], rows)


if __name__ == "__main__":
    sys.exit(
        run_benchmark(
            "generated", "Counts the bytes of a block's generated code.", GeneratedOptions, report
        )
    )
