"""Measure training on a GPU: model FLOP utilisation, memory and precisions of several programs.

python -m benchmarks.gpu --help. Without a GPU `--models toy` runs everything on the CPU, which
only shows that the benchmark works.
"""

import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from benchmarks.measure import Case, CaseFailed, Usage, figures, interleave, median, run
from benchmarks.report import (
    Goal,
    ReportOptions,
    Section,
    at_least,
    at_most,
    machine,
    program_table,
    render,
    run_benchmark,
)
from benchmarks.shapes import SHAPES, Inputs, Shape, make_inputs
from benchmarks.training import nanogpt_case, our_case, peer_case
from llm.config.options import option
from llm.errors import ConfigError

Model = Literal["gpt2", "gpt2-xl", "llama-1b", "toy"]
Precision = Literal["bf16", "fp16", "no"]
_NANO = "nanoGPT compiled, bf16"
_MODELS: dict[str, Shape] = {
    "gpt2": Shape(
        name="GPT-2 124M", layers=12, width=768, heads=12,
        block_size=1024, batch_size=16, vocab_size=50_257, steps=60,
    ),
    "gpt2-xl": Shape(
        name="GPT-2 XL 1.5B", layers=48, width=1600, heads=25,
        block_size=1024, batch_size=8, vocab_size=50_257, steps=40,
    ),
    "llama-1b": Shape(
        name="Llama 1B", layers=16, width=2048, heads=32,
        block_size=2048, batch_size=4, vocab_size=32_000, steps=40,
    ),
    "toy": SHAPES["toy"],
}  # fmt: skip
_LEAST_MFU = {"gpt2": 0.5, "gpt2-xl": 0.55, "llama-1b": 0.55}
_TORCHTITAN = (
    "torchtitan publishes 6,667 tokens/s a GPU, 33 to 39 % MFU, for Llama 3.1 8B on 8 H100, "
    "compiled, in bf16 (its benchmarks of December 2024)"
)
_KFAC_TOKENS = 8192
"""Tokens of a step in the comparison of K-FAC's step with AdamW's."""


@dataclass(frozen=True, kw_only=True)
class GPUBenchmarkOptions(ReportOptions):
    """Options of the benchmark."""

    models: tuple[Model, ...] = option(
        ("gpt2", "gpt2-xl", "llama-1b"), "Models to train.", group="Run"
    )
    precisions: tuple[Precision, ...] = option(
        ("bf16", "fp16", "no"), "Precisions of our runs, bf16 among them.", group="Run"
    )
    compile: bool = option(True, "Also measure bf16 with --torch_compile.", group="Run")
    largest: bool = option(
        True, "Search the largest micro-batch that fits, for ours and a plain loop.", group="Run"
    )
    repeats: int = option(3, "Runs of each program, interleaved.", group="Run", at_least=1)
    nanogpt: str | None = option(None, "A checkout of nanoGPT, for gpt2.", group="Peers")
    peer_python: str = option(sys.executable, "The Python that runs nanoGPT.", group="Peers")


def check(options: GPUBenchmarkOptions) -> None:
    """Refuse options that cannot work.

    Raises:
        ConfigError: There is no GPU for such a model, no bf16 to compare with, or no nanoGPT.
    """
    if device_name() is None and set(options.models) - {"toy"}:
        raise ConfigError(
            "--models " + " ".join(options.models) + " need a GPU, and torch sees none; --models "
            "toy runs the programs without one."
        )
    if "bf16" not in options.precisions:
        raise ConfigError("--precisions must have bf16, which the others are compared with.")
    if options.nanogpt is not None and not Path(options.nanogpt, "train.py").is_file():
        raise ConfigError(f"--nanogpt {options.nanogpt} holds no train.py.")
    if shutil.which(options.peer_python) is None:
        raise ConfigError(f"--peer_python {options.peer_python} cannot be run.")


def device_name() -> str | None:
    """Return the GPU's name, read in another process so that this one stays small."""
    source = (
        "import torch; print(torch.cuda.get_device_name() if torch.cuda.is_available() else '')"
    )
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True)
    return done.stdout.strip() or None


def inputs_of(model: str, shape: Shape, folder: Path) -> Inputs:
    """Make text, tokens and a configuration, for a Llama in place of GPT-2's."""
    inputs = make_inputs(shape, folder)
    if model == "llama-1b":
        config = {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "num_hidden_layers": shape.layers,
            "hidden_size": shape.width,
            "num_attention_heads": shape.heads,
            "num_key_value_heads": 8,
            "intermediate_size": 4 * shape.width,
            "max_position_embeddings": shape.block_size,
            "vocab_size": shape.vocab_size,
            "bos_token_id": 0,
            "eos_token_id": 0,
        }
        (inputs.model / "config.json").write_text(json.dumps(config))
    return inputs


def cases_of(
    options: GPUBenchmarkOptions, model: str, shape: Shape, inputs: Inputs, folder: Path
) -> list[Case]:
    """Return all programs, each training one model."""
    cases = [
        our_case(
            shape,
            inputs,
            folder,
            name=f"llm, {precision}",
            flags=("--mixed_precision", precision, "--no_torch_compile"),
        )
        for precision in options.precisions
    ]
    if options.compile:
        flags = ("--mixed_precision", "bf16", "--torch_compile")
        cases.append(our_case(shape, inputs, folder, name="llm, bf16, compiled", flags=flags))
    cases += [
        peer_case(
            f"plain loop, {precision}", "plain_loop", shape, inputs, folder, precision=precision
        )
        for precision in options.precisions
    ]
    cases.append(
        peer_case("HF Trainer, bf16", "hf_trainer", shape, inputs, folder, precision="bf16")
    )
    if options.nanogpt is not None and model == "gpt2":
        nano = nanogpt_case(
            shape,
            inputs,
            folder,
            checkout=Path(options.nanogpt).resolve(),
            python=str(Path(shutil.which(options.peer_python) or "").absolute()),
            compiled=True,
            device="cuda",
            dtype="bfloat16",
        )
        cases.append(replace(nano, name=_NANO))
    return cases


def kfac_cases(shape: Shape, inputs: Inputs, folder: Path) -> list[Case]:
    """Return AdamW and K-FAC on steps of at most `_KFAC_TOKENS` tokens."""
    samples = max(1, min(shape.batch_size, _KFAC_TOKENS // shape.block_size))
    smaller = replace(shape, batch_size=samples)
    return [
        our_case(smaller, inputs, folder, name=name, flags=("--mixed_precision", "bf16", *flags))
        for name, flags in (("AdamW", ()), ("K-FAC", ("--kfac",)))
    ]


def measure(options: GPUBenchmarkOptions, model: str, folder: Path) -> Section:
    """Measure speed and memory of all programs on one model."""
    shape = _MODELS[model]
    inputs = inputs_of(model, shape, folder / "inputs")
    cases = cases_of(options, model, shape, inputs, folder)
    run(cases[0])  # warm-up: tokenises
    results = interleave(cases, options.repeats)
    steps = interleave(kfac_cases(shape, inputs, folder), options.repeats)
    bf16 = results["llm, bf16"]

    def cells(_: str, runs: Sequence[Usage]) -> Sequence[str]:
        speed = median(runs, "tokens_per_second")
        # The peers' MFU follows from ours by speed, since they train the same model.
        share = median(bf16, "mfu") * speed / median(bf16, "tokens_per_second") if bf16 else 0.0
        return [
            f"{speed:,.0f}",
            f"{share:.1%}",
            _one(runs, "memory_megabytes"),
            _one(runs, "milestone_seconds"),
        ]

    header = ["program", "tokens/s", "MFU", "peak MB of the device", "first step, s"]
    lines = program_table(header, results, cells)
    found = goals(model, results)
    if all(steps.values()):
        adamw, kfac = (median(runs, "tokens_per_second") for runs in steps.values())
        lines += ["", f"K-FAC's median step takes {adamw / kfac:.2f} of AdamW's, in bf16."]
        if model in _LEAST_MFU:
            name = f"{shape.name}: K-FAC's step, AdamW's = 1"
            found.append(at_most(name, adamw / kfac, 1.15, ""))
    if options.largest:
        lines += ["", *largest_batches(shape, inputs, folder)]
    return Section(title=str(shape), lines=lines, goals=found)


def _one(runs: Sequence[Usage], name: str) -> str:
    value = median(runs, name) if figures(runs, name) else float("nan")
    return "" if value != value else f"{value:,.0f}"


def largest_batches(shape: Shape, inputs: Inputs, folder: Path) -> list[str]:
    """Search the largest batch that fits in bf16, for ours and for the plain loop; return lines."""
    found = []
    for name in ("llm", "plain loop"):
        batch, fits = shape.batch_size, 0
        # Doubled each time, with a bound for the toy, which always fits.
        while batch <= 64 * shape.batch_size:
            tried = replace(shape, batch_size=batch, steps=3)
            flags = ("--mixed_precision", "bf16", "--no_torch_compile")
            case = (
                our_case(tried, inputs, folder, name="largest", flags=flags)
                if name == "llm"
                else peer_case("largest", "plain_loop", tried, inputs, folder, precision="bf16")
            )
            try:
                run(case)
            except CaseFailed:
                break
            fits, batch = batch, 2 * batch
        found.append(f"Largest micro-batch in bf16, doubling, {name}: {fits} samples.")
        found.append("")
    return found[:-1]


def goals(model: str, results: dict[str, list[Usage]]) -> list[Goal]:
    """Return the goals of a model."""
    ours = results.get("llm, bf16, compiled") or results["llm, bf16"]
    found: list[Goal] = []
    if not ours or model not in _LEAST_MFU:
        return found
    name = _MODELS[model].name
    best = max(ours, results["llm, bf16"], key=lambda runs: median(runs, "tokens_per_second"))
    found.append(at_least(f"{name}: MFU in bf16", median(best, "mfu"), _LEAST_MFU[model]))
    if results.get(_NANO):
        ratio = median(best, "tokens_per_second") / median(results[_NANO], "tokens_per_second")
        found.append(at_least(f"{name}: speed of nanoGPT compiled", ratio, 1.1))
    if results.get("llm, fp16"):
        half = results["llm, fp16"]
        ratio = median(half, "tokens_per_second") / median(
            results["llm, bf16"], "tokens_per_second"
        )
        found.append(at_least(f"{name}: fp16's speed, bf16 = 1", ratio, 0.95))
        if results.get("llm, no"):
            memory = median(half, "memory_megabytes") / median(
                results["llm, no"], "memory_megabytes"
            )
            found.append(at_most(f"{name}: fp16's memory, fp32 = 1", memory, 0.99, ""))
    return found


def report(options: GPUBenchmarkOptions, folder: Path) -> str:
    """Measure all chosen models and return the report."""
    check(options)
    facts = [
        *machine(("torch", "transformers", "accelerate")),
        f"GPU: {device_name() or 'none, so that the figures say nothing'}",
        f"Medians of {options.repeats} interleaved runs",
        _TORCHTITAN,
    ]
    sections = [measure(options, model, folder / model) for model in options.models]
    return render("Training on a GPU", facts, sections)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; return the exit code."""
    return run_benchmark("gpu", "Measures training on a GPU.", GPUBenchmarkOptions, report, argv)


if __name__ == "__main__":
    sys.exit(main())
