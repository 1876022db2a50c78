"""The commands whose results are recorded, run in a folder that has `inputs/`."""

import contextlib
import importlib
import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.support.ranks import run_ranks

FOLDER = Path(__file__).parent

_TRAIN = """
  --model_type gpt2 --tokenizer_name inputs/tokenizer --train_file inputs/text.txt
  --config_overrides n_embd=16,n_layer=1,n_head=2,n_positions=32,vocab_size=320,bos_token_id=0
  --block_size 32 --per_device_train_batch_size 2 --gradient_accumulation_steps 2
  --learning_rate 0.003 --lr_scheduler_type constant --weight_decay 0.1 --seed 3
  --logging_steps 1 --report_to none --data_cache_dir cache --checkpointing_steps 4
"""
RUNS = {"adamw": [], "kfac": ["--kfac", "--kfac_factor_update_steps", "2"]}
"""What each recorded run adds to these options."""
STEPS = 4
"""Steps of a recorded run; resuming it trains as many again."""

PREPARED = {
    "megatron": "--input inputs/text.jsonl --output_prefix out/corpus",
    "shuffled": "--input inputs/text.jsonl inputs/text.txt --text_unit line --no_append_eos "
    "--shuffle documents --seed 5 --output_prefix out/corpus",
    "nanogpt": "--input inputs/text.txt --text_unit paragraph --format nanogpt "
    "--validation_split_percentage 20 --output_prefix out/corpus",
}
"""Preparations of token files, by name."""


@dataclass
class Done:
    """A program that has ended: its exit code and what it printed."""

    code: int
    output: str


def run(folder: Path, program: str, *argv: str) -> Done:
    """Run a program's `main` in a process of its own, in a folder that has `inputs/`."""
    with contextlib.suppress(FileExistsError):
        (folder / "inputs").symlink_to(FOLDER / "inputs")
    (outcome,) = run_ranks(_main, 1, folder, program, argv, timeout=240)
    assert outcome.error is None, f"{outcome.error}\n{outcome.output}"
    return Done(outcome.value, outcome.output)


def _main(folder: Path, program: str, argv: Sequence[str]) -> int:
    os.chdir(folder)
    return importlib.import_module(program).main(argv)


def train(folder: Path, name: str, *argv: str) -> Done:
    """Run the trainer with a recorded run's options; it must end well."""
    command = [*_TRAIN.split(), *RUNS[name], "--output_dir", f"runs/{name}", *argv]
    done = run(folder, "llm.trainers.gpt.main", *command)
    assert done.code == 0, done.output
    return done


def losses(folder: Path) -> dict[int, float]:
    """The training loss of each step that a run has logged."""
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    return {record["step"]: record["loss"] for record in records if "loss" in record}


def refusal(argv: list[str], folder: Path) -> dict[str, object]:
    """How the trainer refuses a command: its exit code, and the options that it speaks of."""
    done = run(folder, "llm.trainers.gpt.main", *argv)
    assert "Traceback" not in done.output, done.output
    return {"code": done.code, "options": sorted(set(re.findall(r"--\w+", done.output)))}
