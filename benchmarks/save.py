"""Measure how long a checkpoint blocks training: in the background, blocking, by Accelerate.

python -m benchmarks.save [--hidden_size 768 --num_layers 12 --vocab_size 50257 --repeats 5]
"""

import shutil
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.report import (
    Goal,
    ReportOptions,
    Section,
    machine,
    render,
    run_benchmark,
    table,
)
from llm.config.options import option


@dataclass(frozen=True, kw_only=True)
class SaveBenchmarkOptions(ReportOptions):
    """Options of the benchmark; the default model is GPT-2 of 124 million parameters."""

    hidden_size: int = option(768, "Width of the model.", group="Model", at_least=64)
    num_layers: int = option(12, "Layers of the model.", group="Model", at_least=1)
    vocab_size: int = option(50257, "Tokens of the model.", group="Model", at_least=64)
    repeats: int = option(5, "Rounds, of which the figures are medians.", group="Run", at_least=1)


class State:
    """Weights and AdamW's moments of a GPT-2, as a strategy names them."""

    def __init__(self, options: SaveBenchmarkOptions) -> None:
        import torch
        from accelerate import Accelerator
        from transformers import GPT2Config, GPT2LMHeadModel

        config = GPT2Config(
            n_embd=options.hidden_size,
            n_layer=options.num_layers,
            n_head=options.hidden_size // 64,
            vocab_size=options.vocab_size,
        )
        self.accelerator = Accelerator(cpu=True)
        model = GPT2LMHeadModel(config)
        optimizer = torch.optim.AdamW(model.parameters())
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)

    def state_dict(self) -> dict[str, Any]:
        """Return all tensors, not copied."""
        named = dict(self.model.named_parameters())
        moments = self.optimizer.optimizer.state
        return {
            "model": {name: parameter.detach() for name, parameter in named.items()},
            "optimizer": {name: moments[parameter] for name, parameter in named.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Do nothing: the benchmark loads no checkpoint."""


def report(options: SaveBenchmarkOptions, folder: Path) -> str:
    """Time the three ways of saving alternately, and return the report."""
    from llm.checkpoint.options import CheckpointOptions
    from llm.checkpoint.save import Saver

    state = State(options)
    size = sum(file_bytes(state.state_dict()[kind]) for kind in ("model", "optimizer"))
    savers = {
        name: Saver(
            CheckpointOptions(async_checkpoint=name == "background", keep_checkpoints=1),
            folder / name,
            parts={"strategy": state},
            metadata={},
            rank=0,
            world_size=1,
        )
        for name in ("background", "blocking")
    }
    held: dict[str, list[float]] = {"background": [], "blocking": [], "accelerate": []}
    written: list[float] = []
    for step in range(options.repeats + 1):
        began = time.perf_counter()
        savers["background"].save(step=step, eval_loss=None)
        background = time.perf_counter() - began
        savers["background"].finish(is_final=True)
        whole = time.perf_counter() - began
        blocking = timed(lambda step=step: savers["blocking"].save(step=step, eval_loss=None))  # type: ignore[misc]
        theirs = timed(lambda: state.accelerator.save_state(str(folder / "accelerate")))
        shutil.rmtree(folder / "accelerate")
        if step:  # the first one also allocates the memory that later ones reuse
            held["background"].append(background)
            held["blocking"].append(blocking)
            held["accelerate"].append(theirs)
            written.append(whole)
    packages = ["torch", "accelerate", "safetensors"]
    return render("Saving", machine(packages), [section(held, written, size)])


def file_bytes(tree: Any) -> int:
    """Return the bytes of all tensors in nested dicts."""
    if isinstance(tree, dict):
        return sum(file_bytes(value) for value in tree.values())
    return int(tree.nbytes)


def timed(action: Callable[[], object]) -> float:
    """Return the seconds that an action takes."""
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def section(held: dict[str, list[float]], written: list[float], size: int) -> Section:
    """Return the table and the goals."""
    medians = {name: statistics.median(values) for name, values in held.items()}
    names = {
        "background": f"llm, in the background (written in {statistics.median(written):.2f} s)",
        "blocking": "llm, --no_async_checkpoint",
        "accelerate": "accelerate.save_state (nothing synced, no checksum)",
    }
    rows = [
        [names[name], f"{medians[name]:.3f}", f"{min(values):.3f} to {max(values):.3f}"]
        for name, values in held.items()
    ]
    share = medians["background"] / medians["blocking"]
    beside = medians["background"] / medians["accelerate"]
    return Section(
        title=f"A checkpoint of {size / 1e9:.2f} GB",
        lines=table(["way", "held up, s", "spread"], rows),
        goals=[
            Goal(
                what="held up, share of blocking < 10 %", measured=f"{share:.1%}", met=share < 0.1
            ),
            Goal(
                what="held up < 0.35 s",
                measured=f"{medians['background']:.3f} s",
                met=medians["background"] < 0.35,
            ),
            Goal(
                what="held up, share of save_state < 30 %",
                measured=f"{beside:.1%}",
                met=beside < 0.3,
            ),
        ],
    )


if __name__ == "__main__":
    sys.exit(
        run_benchmark(
            "save", "Measures how long a checkpoint blocks training.", SaveBenchmarkOptions, report
        )
    )
