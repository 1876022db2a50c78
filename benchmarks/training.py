"""Training programs side by side: inputs of a shape, one case for each program, what they print.

Speed does not depend on what a text says, so the inputs are random words of a made-up vocabulary:
a tokenizer of one token a word for those that read text, and the same ids as a flat file.
"""

import array
import json
import os
import random
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.measure import Case

ROOT = Path(__file__).parent.parent
_WARM_UP = 0.2
"""Share of the steps that do not count: caches and allocators settle."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A GPT-2 and its batch.

    Attributes:
        name: For the table.
        layers: Blocks.
        width: Of the hidden states.
        heads: Of attention.
        block_size: Tokens of a sample.
        batch_size: Samples of a step.
        vocab_size: Tokens.
        steps: Optimizer steps of one run.
    """

    name: str
    layers: int
    width: int
    heads: int
    block_size: int
    batch_size: int
    vocab_size: int
    steps: int

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.batch_size * self.block_size

    @property
    def flops_per_token(self) -> float:
        """Operations of forward and backward: 6 a weight of a product, and attention in full."""
        weights = 12 * self.layers * self.width**2 + self.vocab_size * self.width
        return 6.0 * weights + 12.0 * self.layers * self.width * self.block_size

    def __str__(self) -> str:
        return (
            f"{self.name}: {self.layers} layers, width {self.width}, context {self.block_size}, "
            f"batch {self.batch_size}, vocabulary {self.vocab_size:,}"
        )


SHAPES = {
    "A": Shape(
        name="A",
        layers=4,
        width=128,
        heads=4,
        block_size=64,
        batch_size=12,
        vocab_size=65,
        steps=250,
    ),
    "B": Shape(
        name="B",
        layers=6,
        width=384,
        heads=6,
        block_size=256,
        batch_size=4,
        vocab_size=50_257,
        steps=25,
    ),
    "C": Shape(
        name="C",
        layers=12,
        width=768,
        heads=12,
        block_size=1024,
        batch_size=1,
        vocab_size=50_257,
        steps=8,
    ),
    "toy": Shape(
        name="toy",
        layers=2,
        width=32,
        heads=2,
        block_size=16,
        batch_size=2,
        vocab_size=65,
        steps=10,
    ),
}


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """The files of a shape.

    Attributes:
        model: Folder with a configuration, a tokenizer and no weights.
        text: Random words, a few hundred a line.
        validation: A short text for those that insist on one.
        tokens: The same as a nanoGPT data folder.
    """

    model: Path
    text: Path
    validation: Path
    tokens: Path


def make_inputs(shape: Shape, folder: Path) -> Inputs:
    """Write a configuration, a tokenizer, and more than enough text for all steps."""
    model = folder / "gpt2"
    model.mkdir(parents=True)
    config = {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "n_layer": shape.layers,
        "n_embd": shape.width,
        "n_head": shape.heads,
        "n_positions": shape.block_size,
        "vocab_size": shape.vocab_size,
        "bos_token_id": 0,
        "eos_token_id": 0,
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
    }
    (model / "config.json").write_text(json.dumps(config))
    _write_tokenizer(model, shape.vocab_size)
    draw = random.Random(0)
    ids = [draw.randrange(1, shape.vocab_size) for _ in range((shape.steps + 20) * shape.tokens)]
    lines = [" ".join(f"w{i}" for i in ids[at : at + 250]) for at in range(0, len(ids), 250)]
    text = folder / "train.txt"
    text.write_text("\n".join(lines) + "\n")
    validation = folder / "validation.txt"
    few = -(-2 * shape.tokens // 250)
    validation.write_text("\n".join(lines[:few]) + "\n")
    tokens = folder / "tokens"
    tokens.mkdir()
    for name in ("train.bin", "val.bin"):
        (tokens / name).write_bytes(array.array("H", ids).tobytes())
    return Inputs(model=model, text=text, validation=validation, tokens=tokens)


def _write_tokenizer(folder: Path, vocab_size: int) -> None:
    vocab = {"<|endoftext|>": 0, **{f"w{i}": i for i in range(1, vocab_size)}}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": 0,
                "content": "<|endoftext|>",
                "special": True,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
            }
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "<|endoftext|>"},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    names = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|endoftext|>",
        "unk_token": "<|endoftext|>",
        "model_max_length": 1024,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(names))


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
    """The trainer as a user runs it, its log and TensorBoard included."""
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
        environment={"PYTHONPATH": str(ROOT), **_threads(threads)},
        read=lambda run: _our_figures(run, shape),
        milestone=r"^step +",
    )


def _our_figures(folder: Path, shape: Shape) -> dict[str, Any]:
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    counted = [r["ms_per_step"] for r in records if r["step"] > _WARM_UP * shape.steps]
    return {"tokens_per_second": 1000 * shape.tokens / median(counted)}


def nanogpt_case(
    shape: Shape, inputs: Inputs, folder: Path, *, checkout: Path, python: str, compiled: bool
) -> Case:
    """The train.py of nanoGPT as shipped."""
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
    """The ancestor's trainer as its guide runs it."""
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
    """One of the small programs of benchmarks/peers, which print their own figures."""
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


def _threads(number: int | None) -> Mapping[str, str]:
    return {} if number is None else {"OMP_NUM_THREADS": str(number)}


def _from_log(
    pattern: str, shape: Shape, *, milliseconds: bool = False, log: str = "log.txt"
) -> Callable[[Path], dict[str, Any]]:
    """Reads the time of each step from the lines of a log."""

    def read(folder: Path) -> dict[str, Any]:
        text = (folder / log).read_text(errors="replace")
        times = {int(step): float(time) for step, time in re.findall(pattern, text, re.MULTILINE)}
        counted = [time for step, time in times.items() if step > _WARM_UP * shape.steps]
        unit = 1000 if milliseconds else 1
        return {"tokens_per_second": unit * shape.tokens / median(counted)} if counted else {}

    return read
