"""Time each kernel that a GPU may use, and the one that it replaces.

python -m benchmarks.levers [--parts softmax loss block] [--seconds 150] --rows rows.jsonl

Every row is printed and written as soon as it is measured. `--device cpu` rehearses the program
with toy shapes; its times mean nothing.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.generated import SHAPES, VARIANTS, BlockShape, make_model
from benchmarks.report import (
    ReportOptions,
    Section,
    machine,
    render,
    run_benchmark,
    table,
    write_report,
)
from llm.config.options import option
from llm.errors import ConfigError, one_line

if TYPE_CHECKING:
    from torch import Tensor

Call = Callable[[], Sequence["Tensor"]]
"""Computes one repetition; returns tensors that all kernels of a comparison compute."""

_TOY_CONFIGS = {
    "gpt2": {"n_embd": 32, "n_head": 2},
    "llama": {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
}
_LOSS_SHAPES = ((65536, 768, 50257), (16384, 2048, 32000))
"""Tokens, width and vocabulary of GPT-2 124M and TinyLlama 1.1B."""


@dataclass(frozen=True, kw_only=True)
class LeversOptions(ReportOptions):
    """Options of the benchmark."""

    device: str = option("cuda", "Device to measure.", group="Run")
    parts: tuple[str, ...] = option((), "Of softmax, loss, block; by default all.", group="Run")
    seconds: int = option(240, "No comparison begins later than this.", group="Run", at_least=1)
    repeats: int = option(15, "Repetitions in each of three rounds.", group="Run", at_least=1)
    rows: str | None = option(None, "File to append each row to, as JSON.", group="Run")


@dataclass(frozen=True)
class Comparison:
    """Kernels that compute the same; the first one is the baseline."""

    name: str
    calls: Mapping[str, Call]


def softmax_comparisons(options: LeversOptions) -> Iterator[Comparison]:
    """Yield the softmax kernel with a program per row, and with as many as suit the card."""
    import torch

    from llm.models.softmax_kernel import choose_softmax, softmax_in_place

    device = torch.device(options.device)
    for _, _, vocab_size in _LOSS_SHAPES:
        columns = -(-vocab_size // 128) * 128
        source = torch.randn(9472, columns, device=device, dtype=torch.bfloat16)
        labels = torch.randint(vocab_size, (len(source),), device=device)

        def call(softmax: Any, source: "Tensor" = source, labels: "Tensor" = labels) -> Call:
            logits = source.clone()
            return lambda: softmax(logits, labels, vocab_size, True, 0.0)[:1]  # noqa: B023

        copy = torch.empty_like(source)
        yield Comparison(
            f"softmax of {len(source):,} x {columns:,}",
            {
                "a program per row": call(softmax_in_place),
                "few programs": call(choose_softmax(device, columns)),
                "copy of the logits": lambda: (copy.copy_(source),),  # noqa: B023
            },
        )


def loss_comparisons(options: LeversOptions) -> Iterator[Comparison]:
    """Yield the loss and its gradients with both softmax kernels, or torch's operations."""
    import torch

    from llm.models.cross_entropy import chunked_cross_entropy
    from llm.models.loss_chunks import LossChunks

    device = torch.device(options.device)
    is_gpu = device.type == "cuda"
    num_multiprocessors, num_bytes = None, 2**18
    if is_gpu:
        properties = torch.cuda.get_device_properties(device)
        num_multiprocessors, num_bytes = properties.multi_processor_count, 2**30
    chunks = LossChunks(num_bytes=num_bytes, num_multiprocessors=num_multiprocessors)
    for tokens, width, vocab_size in _LOSS_SHAPES if is_gpu else ((256, 32, 500),):
        hidden = torch.randn(tokens, width, device=device, requires_grad=True)
        weight = (0.02 * torch.randn(vocab_size, width, device=device)).requires_grad_()
        labels = torch.randint(vocab_size, (tokens,), device=device)
        chunk_rows = chunks.choose_rows(tokens, vocab_size, width, is_in_place=is_gpu)

        def call(
            softmax: Any,
            inputs: tuple["Tensor", "Tensor"] = (hidden, weight),
            labels: "Tensor" = labels,
            chunk_rows: int = chunk_rows,
            vocab_size: int = vocab_size,
        ) -> Call:
            def run() -> Sequence["Tensor"]:
                with torch.autocast(device.type, torch.bfloat16):
                    loss, _ = chunked_cross_entropy(
                        *inputs,
                        None,
                        labels,
                        vocab_size=vocab_size,
                        chunk_rows=chunk_rows,
                        column_multiple=128,
                        softmax=softmax,
                    )
                return torch.autograd.grad(loss / len(labels), inputs)

            return run

        calls = {"torch's operations": call(None)}
        if is_gpu:
            from llm.models.softmax_kernel import choose_softmax, softmax_in_place

            few_programs = choose_softmax(device, -(-vocab_size // 128) * 128)
            calls = {"a program per row": call(softmax_in_place)}
            calls["few programs"] = call(few_programs)
        yield Comparison(f"loss of {tokens:,} x {width:,}, chunks of {chunk_rows:,}", calls)


def block_comparisons(options: LeversOptions) -> Iterator[Comparison]:
    """Yield forward and backward passes of a block with each choice of kernels.

    On a CPU, blocks are not compiled, so they all compute the same.
    """
    for name, shape in SHAPES.items():
        if options.device == "cpu":
            toy_config = {**shape.config, **_TOY_CONFIGS[name]}
            shape = replace(shape, batch_size=2, length=16, config=toy_config)
        calls = {variant: _block_call(shape, variant, options.device) for variant in VARIANTS}
        yield Comparison(f"block of {name}, {shape.batch_size} x {shape.length:,}", calls)


def _block_call(shape: BlockShape, variant: str, device: str) -> Call:
    import torch

    from llm.models.sizes import find_blocks

    model, compile_options = make_model(shape, variant, attention="sdpa")
    torch.manual_seed(0)
    block = find_blocks(model)[0].to_empty(device=device).train()
    parameters = list(block.parameters())
    for parameter in parameters:
        torch.nn.init.normal_(parameter, std=0.02)
    if device != "cpu":
        block.compile(dynamic=False, options=compile_options)
    hidden, further_inputs = shape.make_inputs(model.config, device)
    gradient = torch.randn_like(hidden)
    hidden.requires_grad_()

    def run() -> Sequence["Tensor"]:
        with torch.autocast(torch.device(device).type, torch.bfloat16):
            output = block(hidden, **further_inputs)
        output = output[0] if isinstance(output, tuple) else output
        return torch.autograd.grad(output, [hidden, *parameters], gradient)

    return run


_PARTS = {"softmax": softmax_comparisons, "loss": loss_comparisons, "block": block_comparisons}


def measure(comparison: Comparison, repeats: int, device: str) -> list[dict[str, Any]]:
    """Time the kernels of a comparison in turn, in three rounds, because a warm GPU slows down.

    Returns:
        A row per kernel: the median and the range of its milliseconds, relative to the baseline's,
        and the distance of its results from the baseline's, relative to their norm.
    """
    results = {name: list(call()) for name, call in comparison.calls.items()}
    (baseline, *_) = comparison.calls
    times: dict[str, list[float]] = {name: [] for name in comparison.calls}
    for _ in range(3):
        for name, call in comparison.calls.items():
            times[name] += _times_of(call, repeats, device)
    baseline_ms = statistics.median(times[baseline])
    rows = []
    for name, milliseconds in times.items():
        median = statistics.median(milliseconds)
        pairs = list(zip(results[name], results[baseline], strict=True))
        is_alike = all(one.shape == other.shape for one, other in pairs)
        distances = [_distance(one, other) for one, other in pairs] if is_alike else []
        rows.append(
            {
                "comparison": comparison.name,
                "kernel": name,
                "ms": round(median, 4),
                "range": [round(min(milliseconds), 4), round(max(milliseconds), 4)],
                "of_baseline": round(median / baseline_ms, 4),
                "distance": max(distances) if distances else None,
            }
        )
    return rows


def _times_of(call: Call, repeats: int, device: str) -> list[float]:
    """Return the milliseconds of each repetition, after one that does not count."""
    import torch

    call()
    milliseconds = []
    for _ in range(repeats):
        if device == "cpu":
            start = time.perf_counter()
            call()
            milliseconds.append(1000 * (time.perf_counter() - start))
        else:
            start_event, end_event = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start_event.record()
            call()
            end_event.record()
            end_event.synchronize()
            milliseconds.append(start_event.elapsed_time(end_event))
    return milliseconds


def _distance(one: "Tensor", other: "Tensor") -> float:
    return float((one.float() - other.float()).norm() / other.float().norm())


def report(options: LeversOptions, folder: Path) -> str:
    """Measure all comparisons, and return the report."""
    import torch

    unknown_parts = [part for part in options.parts if part not in _PARTS]
    if unknown_parts:
        raise ConfigError(f"--parts {unknown_parts[0]} is none of: {', '.join(_PARTS)}.")
    if options.device not in ("cpu", "cuda"):
        raise ConfigError(f"--device {options.device} is neither cuda nor cpu.")
    is_gpu = options.device == "cuda"
    deadline = time.monotonic() + options.seconds
    card = torch.cuda.get_device_name() if is_gpu else "a rehearsal on a CPU"
    facts = [*machine(("torch", "transformers")), f"{card}; medians over three rounds, in turn"]
    sections: list[Section] = []
    for part in options.parts or _PARTS:
        if not is_gpu and part == "softmax":
            reason = "Not measured: the kernel needs a GPU."
            sections.append(Section(title=part, lines=[reason]))
            continue
        cells: list[list[str]] = []
        sections.append(Section(title=part, lines=[]))
        for comparison in _PARTS[part](options):
            if time.monotonic() > deadline:
                break
            cells += _measure_and_print(options, comparison)
            lines = table(["comparison", "kernel", "ms", "of the first", "distance"], cells)
            sections[-1] = Section(title=part, lines=lines)
            write_report(options, render("Kernels", facts, sections))
    return render("Kernels", facts, sections)


def _measure_and_print(options: LeversOptions, comparison: Comparison) -> list[list[str]]:
    """Print a comparison's rows, append them to the file, and return their cells in the report."""
    try:
        rows = measure(comparison, options.repeats, options.device)
    except Exception as error:  # a kernel that fails must not end the comparisons that follow
        message = f"{type(error).__name__}: {one_line(error)}"
        rows = [{"comparison": comparison.name, "error": message}]
    cells = []
    for row in rows:
        text = json.dumps(row)
        print(text, flush=True)
        if options.rows is not None:
            with open(options.rows, "a", encoding="utf-8") as file:
                file.write(text + "\n")
        if "error" in row:
            cells.append([row["comparison"], row["error"], "", "", ""])
            continue
        distance = "" if row["distance"] is None else f"{row['distance']:.1e}"
        figures = [f"{row['ms']:.3f}", f"{row['of_baseline']:.3f}", distance]
        cells.append([row["comparison"], row["kernel"], *figures])
    return cells


if __name__ == "__main__":
    sys.exit(run_benchmark("levers", "Times kernels and what they replace.", LeversOptions, report))
