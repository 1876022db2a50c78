"""The training programs: the case of each, and how to read its figures."""

import json
import math
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.measure import Case
from benchmarks.shapes import Inputs, Shape

ROOT = Path(__file__).parent.parent
_WARM_UP = 0.2  # fraction of the steps that does not count, while caches and allocators settle


def our_case(
    shape: Shape,
    inputs: Inputs,
    folder: Path,
    *,
    name: str = "llm",
    ranks: int = 1,
    threads: int | None = None,
    flags: tuple[str, ...] = (),
) -> Case:
    """Return the case of our trainer as a user runs it, with log and TensorBoard."""
    command = [
        *(sys.executable, "-m"),
        *(
            ("torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}", "-m")
            * (ranks > 1)
        ),
        "llm.trainers.gpt",
        *("--model_name_or_path", str(inputs.model), "--train_file", str(inputs.text)),
        *("--validation_split_percentage", "0", "--block_size", str(shape.block_size)),
        *("--per_device_train_batch_size", str(shape.batch_size // ranks)),
        *("--max_train_steps", str(shape.steps), "--seed", "1", "--learning_rate", "1e-3"),
        *("--weight_decay", "0.1", "--logging_steps", str(max(1, shape.steps // 10))),
        *("--data_cache_dir", str(inputs.text.parent / "cache"), "--output_dir", "run"),
        *flags,
    ]
    return Case(
        name=name,
        command=command,
        folder=folder / name.replace(" ", "-").replace("/", "-"),
        environment={"PYTHONPATH": str(ROOT)}
        | ({} if threads is None else {"OMP_NUM_THREADS": str(threads)}),
        read=lambda run: _our_figures(run, shape),
        milestone=r"^step +",
    )


def _our_figures(folder: Path, shape: Shape) -> dict[str, Any]:
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    records = [record for record in map(json.loads, lines) if "loss" in record]
    counted = [r["ms_per_step"] for r in records if r["step"] > _WARM_UP * shape.steps]
    mfu = [r["mfu"] for r in records if r["step"] > _WARM_UP * shape.steps and "mfu" in r]
    return {
        "tokens_per_second": 1000 * shape.tokens / median(counted),
        "mfu": median(mfu) if mfu else math.nan,
        "memory_megabytes": records[-1]["memory"] / 1e6,
    }


def nanogpt_case(
    shape: Shape,
    inputs: Inputs,
    folder: Path,
    *,
    checkout: Path,
    python: str,
    compiled: bool,
) -> Case:
    """Return the case of nanoGPT's train.py as shipped."""
    name = "nanoGPT compiled" if compiled else "nanoGPT eager"
    data = os.path.relpath(inputs.tokens, checkout / "data")
    settings: dict[str, Any] = {
        "device": "cpu",
        "dtype": "float32",
        "compile": compiled,
        "dataset": data,
        "out_dir": str(folder / name.replace(" ", "-") / "out"),
        "eval_iters": 1,
        "eval_interval": 10**9,
        "log_interval": 1,
        "gradient_accumulation_steps": 1,
        "batch_size": shape.batch_size,
        "block_size": shape.block_size,
        "n_layer": shape.layers,
        "n_head": shape.heads,
        "n_embd": shape.width,
        "bias": True,
        "max_iters": shape.steps,
    }
    meta = inputs.tokens / "meta.pkl"
    if not meta.exists():
        import pickle

        meta.write_bytes(pickle.dumps({"vocab_size": shape.vocab_size}))
    command = [python, "train.py", *(f"--{key}={value}" for key, value in settings.items())]
    return Case(
        name=name,
        command=command,
        folder=folder / name.replace(" ", "-"),
        directory=checkout,
        environment={"PYTHONUNBUFFERED": "1"},
        read=_from_log(r"^iter (\d+): .*time ([\d.]+)ms", shape, milliseconds=True),
        milestone=r"^iter 0:",
    )


def llm_pytorch_case(
    shape: Shape, inputs: Inputs, folder: Path, *, checkout: Path, python: str
) -> Case:
    """Return the case of llm-pytorch's trainer as its guide runs it."""
    command = [
        *(python, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=1"),
        *("-m", "llm.trainers.gpt"),
        *("--config_name", str(inputs.model), "--tokenizer_name", str(inputs.model)),
        *("--train_file", str(inputs.text), "--validation_file", str(inputs.validation)),
        *("--block_size", str(shape.block_size), "--output_dir", "run"),
        *("--per_device_train_batch_size", str(shape.batch_size)),
        *("--per_device_eval_batch_size", str(shape.batch_size)),
        *("--max_train_steps", str(shape.steps), "--seed", "1", "--weight_decay", "0.1"),
    ]
    return Case(
        name="llm-pytorch",
        command=command,
        folder=folder / "llm-pytorch",
        environment={
            "PYTHONPATH": str(checkout),
            "PYTHONUNBUFFERED": "1",
            "HF_HOME": str(inputs.text.parent / "hf"),
            "HF_HUB_OFFLINE": "1",
        },
        read=_from_log(r"step (\d+) \| epoch[^\n]*time \(s\): ([\d.]+)", shape, log="run/log.txt"),
        milestone=r"step 1 \|",
    )


def peer_case(name: str, program: str, shape: Shape, inputs: Inputs, folder: Path) -> Case:
    """Return the case of a program of benchmarks/peers, which prints its own figures."""
    sizes = {
        "steps": shape.steps,
        "batch_size": shape.batch_size,
        "block_size": shape.block_size,
        "warm_up": int(_WARM_UP * shape.steps),
    }
    return Case(
        name=name,
        command=[
            *(sys.executable, "-m", f"benchmarks.peers.{program}"),
            *(str(inputs.model), str(inputs.tokens / "train.bin"), json.dumps(sizes)),
        ],
        folder=folder / name.replace(" ", "-"),
        environment={"PYTHONPATH": str(ROOT)},
    )


def _from_log(
    pattern: str, shape: Shape, *, milliseconds: bool = False, log: str = "log.txt"
) -> Callable[[Path], dict[str, Any]]:
    """Return a reader of each step's time from the lines of a log."""

    def read(folder: Path) -> dict[str, Any]:
        text = (folder / log).read_text(errors="replace")
        times = {int(step): float(time) for step, time in re.findall(pattern, text, re.MULTILINE)}
        counted = [time for step, time in times.items() if step > _WARM_UP * shape.steps]
        unit = 1000 if milliseconds else 1
        return {"tokens_per_second": unit * shape.tokens / median(counted)} if counted else {}

    return read
