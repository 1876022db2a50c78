"""The commands whose results are recorded, run in a folder that has `inputs/`."""

import contextlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

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


def run(folder: Path, module: str, *argv: str) -> subprocess.CompletedProcess[str]:
    """Run a program in a folder, with `inputs/` in it."""
    with contextlib.suppress(FileExistsError):
        (folder / "inputs").symlink_to(FOLDER / "inputs")
    return subprocess.run(
        [sys.executable, "-m", module, *argv],
        cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
        timeout=240,
        # From a folder of its own the package is found by its path.
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(FOLDER.parent.parent)},
    )  # fmt: skip


def train(folder: Path, name: str, *argv: str) -> subprocess.CompletedProcess[str]:
    """Run the trainer with a recorded run's options; it must end well."""
    command = [*_TRAIN.split(), *RUNS[name], "--output_dir", f"runs/{name}", *argv]
    done = run(folder, "llm.trainers.gpt", *command)
    assert done.returncode == 0, done.stdout
    return done


def losses(folder: Path) -> dict[int, float]:
    """The training loss of each step that a run has logged."""
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    return {record["step"]: record["loss"] for record in records if "loss" in record}


def refusal(argv: list[str], folder: Path) -> dict[str, object]:
    """How the trainer refuses a command: its exit code, and the options that it speaks of."""
    done = run(folder, "llm.trainers.gpt", *argv)
    assert "Traceback" not in done.stdout, done.stdout
    return {"code": done.returncode, "options": sorted(set(re.findall(r"--\w+", done.stdout)))}
