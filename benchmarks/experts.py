"""Kinds of balancing of a small mixture of experts on real text, and Hugging Face's Trainer.

python -m benchmarks.experts [--corpus FILE] [--steps 1000] [--seeds 3]

The model is an ERNIE 4.5 mixture: its routers have a bias, and Hugging Face has a loss for them.
All runs have the same size, text, steps and learning rates; initial weights and order depend on the
seed, and differ between the two trainers. The toy shows whether experts stay in use, and what
balancing costs. It cannot show which loss a large model ends with.
"""

import json
import shutil
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.measure import Case, Usage, interleave, say
from benchmarks.report import (
    ReportOptions,
    Section,
    at_most,
    machine,
    program_table,
    render,
    run_benchmark,
    spread,
    table,
)
from llm.config.options import option
from llm.errors import ConfigError

_ROOT = Path(__file__).parent.parent
_LAST_STEPS = 20
"""Steps at the end of a run that its loads are measured in."""
_HF_NONE, _HF_LOSS = "HF Trainer, none", "HF Trainer, its loss"
_COEFFICIENT = 0.01


@dataclass(frozen=True, kw_only=True)
class ExpertsBenchmarkOptions(ReportOptions):
    """Options of the benchmark."""

    corpus: str | None = option(
        None, "A text in UTF-8; its last tenth validates. By default Shakespeare.", group="Run"
    )
    steps: int = option(1000, "Optimizer steps of each run.", group="Run", at_least=2 * _LAST_STEPS)
    seeds: int = option(3, "Runs of each kind.", group="Run", at_least=1)
    without_trainer: bool = option(False, "Leave out Hugging Face's Trainer.", group="Run")
    learning_rate: float = option(3e-3, "Peak rate, cosine to 0.", group="Run", above=0)
    bias_rate: float = option(0.01, "Rate of the bias, for short runs.", group="Run", above=0)
    batch_size: int = option(8, "Samples of a step.", group="Run", at_least=1)
    block_size: int = option(128, "Tokens of a sample.", group="Run", at_least=2)
    layers: int = option(4, "Layers, all with experts.", group="Model", at_least=1)
    width: int = option(128, "Width of the hidden states.", group="Model", at_least=16)
    experts: int = option(16, "Experts of a layer, two for each token.", group="Model", at_least=3)


def balancings(bias_rate: float) -> dict[str, tuple[str, ...]]:
    """Return the options of our trainer for each kind of balancing, by name."""
    loss = ("--router_aux_loss_coef", str(_COEFFICIENT))
    bias = ("--router_bias_update_rate", str(bias_rate))
    small = ("--router_aux_loss_coef", "0.0001", "--router_aux_loss_scope", "sequence")
    return {
        "none": ("--router_balancing", "none"),
        "loss, global batch": ("--router_balancing", "loss", *loss),
        "loss, each sample": (
            *("--router_balancing", "loss", *loss),
            *("--router_aux_loss_scope", "sequence"),
        ),
        "bias": ("--router_balancing", "bias", *bias),
        "bias and a loss of 0.0001 over each sample": ("--router_balancing", "both", *bias, *small),
    }


def write_model(options: ExpertsBenchmarkOptions, folder: Path) -> None:
    """Write the configuration of the mixture, and a tokenizer."""
    from transformers import AutoTokenizer, Ernie4_5_MoeConfig

    shutil.copytree(_ROOT / "examples" / "tokenizer", folder)
    Ernie4_5_MoeConfig(
        vocab_size=len(AutoTokenizer.from_pretrained(folder)),
        hidden_size=options.width,
        intermediate_size=2 * options.width,
        num_hidden_layers=options.layers,
        num_attention_heads=options.width // 16,
        num_key_value_heads=options.width // 16,
        max_position_embeddings=options.block_size,
        moe_num_experts=options.experts,
        moe_k=2,
        moe_intermediate_size=options.width // 2,
        moe_num_shared_experts=0,
        moe_layer_start_index=0,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=None,
    ).save_pretrained(folder)


def split_text(options: ExpertsBenchmarkOptions, folder: Path) -> None:
    """Write the first nine tenths of the corpus, and the last one, into two files.

    Raises:
        ConfigError: The corpus does not exist.
    """
    corpus = Path(options.corpus or _ROOT / "examples" / "data" / "shakespeare.txt")
    if not corpus.is_file():
        raise ConfigError(f"--corpus {corpus} is not a file; give the path of a text.")
    text = corpus.read_text(encoding="utf-8")
    cut = text.index("\n", int(0.9 * len(text))) + 1
    (folder / "train.txt").write_text(text[:cut], encoding="utf-8")
    (folder / "validation.txt").write_text(text[cut:], encoding="utf-8")


def our_case(
    options: ExpertsBenchmarkOptions, folder: Path, *, name: str, words: Sequence[str], seed: int
) -> Case:
    """Return a run of our trainer."""
    tokens = options.batch_size * options.block_size
    command = [
        *(sys.executable, "-m", "llm.trainers.gpt", "--config_name", folder / "model"),
        *("--tokenizer_name", folder / "model", "--train_file", folder / "train.txt"),
        *("--validation_file", folder / "validation.txt", "--data_cache_dir", folder / "cache"),
        *("--block_size", options.block_size, "--max_train_steps", options.steps, "--seed", seed),
        *("--per_device_train_batch_size", options.batch_size, "--eval_steps", options.steps),
        *("--learning_rate", options.learning_rate, "--lr_scheduler_type", "cosine"),
        *("--num_warmup_steps", options.steps // 10, "--weight_decay", 0.1, "--max_grad_norm", 1.0),
        *("--logging_steps", _LAST_STEPS, "--device_peak_tflops", 1, "--report_to", "none"),
        *("--keep_checkpoints", "none", "--output_dir", "run", *words),
    ]
    return Case(
        name=name,
        command=[str(word) for word in command],
        folder=folder / f"{name}, seed {seed}".replace(" ", "-"),
        environment={"PYTHONPATH": str(_ROOT)},
        read=lambda run: _our_figures(run / "run", tokens),
    )


def _our_figures(folder: Path, tokens: int) -> dict[str, Any]:
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    reports = [line for line in lines if "loss" in line]
    counted = [line["ms_per_step"] for line in reports[len(reports) // 5 :]]
    return {
        "eval_loss": json.loads((folder / "all_results.json").read_text())["eval_loss"],
        "max_load": reports[-1]["moe_max_load"],
        "idle_experts": reports[-1]["moe_idle_experts"],
        "load_by_step": {line["step"]: line["moe_max_load"] for line in reports},
        "tokens_per_second": 1000 * tokens / statistics.median(counted),
    }


def trainer_case(
    options: ExpertsBenchmarkOptions, folder: Path, *, name: str, coefficient: float, seed: int
) -> Case:
    """Return a run of Hugging Face's Trainer."""
    sizes = {
        "steps": options.steps,
        "last_steps": _LAST_STEPS,
        "warm_up": options.steps // 10,
        "batch_size": options.batch_size,
        "block_size": options.block_size,
        "learning_rate": options.learning_rate,
        "coefficient": coefficient,
        "seed": seed,
    }
    files = (folder / "model", folder / "train.txt", folder / "validation.txt")
    return Case(
        name=name,
        command=[
            *(sys.executable, "-m", "benchmarks.peers.hf_experts"),
            *(*map(str, files), json.dumps(sizes)),
        ],
        folder=folder / f"{name}, seed {seed}".replace(" ", "-"),
        environment={"PYTHONPATH": str(_ROOT)},
    )


def measure(options: ExpertsBenchmarkOptions, folder: Path) -> list[Section]:
    """Train all kinds with all seeds."""
    write_model(options, folder / "model")
    split_text(options, folder)
    results: dict[str, list[Usage]] = {}
    for seed in range(1, options.seeds + 1):
        cases = [
            our_case(options, folder, name=name, words=words, seed=seed)
            for name, words in balancings(options.bias_rate).items()
        ]
        # Hugging Face's loss is K times ours, and a mean over layers where ours is a sum.
        coefficients = {_HF_NONE: 0.0, _HF_LOSS: _COEFFICIENT * options.layers / 2}
        if not options.without_trainer:
            cases += [
                trainer_case(options, folder, name=name, coefficient=coefficient, seed=seed)
                for name, coefficient in coefficients.items()
            ]
        for name, runs in interleave(cases, 1, say).items():
            results.setdefault(name, []).extend(runs)
    complete = {name: runs for name, runs in results.items() if runs}
    head = ["balancing", "validation loss", "largest load", "idle", "tokens/s", "peak MB"]
    section = Section(
        title=f"{options.layers} layers of {options.experts} experts, width {options.width}",
        lines=[
            f"Medians of {options.seeds} seeds, and the range. Validation loss in nats a token "
            f"after {options.steps:,} steps of {options.batch_size * options.block_size:,} tokens; "
            f"loads of the last {_LAST_STEPS} steps, relative to the mean of a layer; idle experts "
            f"of {options.layers * options.experts}.",
            "",
            *program_table(head, results, _cells),
        ],
        goals=[
            at_most(f"largest load with {name}", _median(results, name, "max_load"), 2.0, "x")
            for name in balancings(options.bias_rate)
            if name != "none" and name in complete
        ],
    )
    ours = {name: runs for name, runs in complete.items() if name in balancings(options.bias_rate)}
    steps = [*next(iter(ours.values()))[0].reported["load_by_step"]]
    rows = [
        [str(step), *(_spread_of_loads(runs, step) for runs in ours.values())] for step in steps
    ]
    curves = Section(
        title="Largest load by step",
        lines=[
            f"Medians of {options.seeds} seeds, and the range, of the {_LAST_STEPS} steps before.",
            "",
            *table(["step", *ours], rows),
        ],
    )
    return [section, curves]


def _spread_of_loads(runs: Sequence[Usage], step: int) -> str:
    loads = [float(run.reported["load_by_step"][step]) for run in runs]
    return f"{statistics.median(loads):.2f} ({min(loads):.2f}-{max(loads):.2f})"


def _cells(name: str, runs: Sequence[Usage]) -> Sequence[str]:
    return [
        spread(runs, "eval_loss", 4),
        spread(runs, "max_load"),
        spread(runs, "idle_experts", 0),
        spread(runs, "tokens_per_second", 0),
        spread(runs, "peak_megabytes", 0),
    ]


def _median(results: Mapping[str, Sequence[Usage]], name: str, figure: str) -> float:
    return statistics.median(float(run.reported[figure]) for run in results[name])


def report(options: ExpertsBenchmarkOptions, folder: Path) -> str:
    """Measure, and return the report."""
    facts = [*machine(["torch", "transformers"]), f"text: {options.corpus or 'Shakespeare'}"]
    return render("Balancing of experts", facts, measure(options, folder))


if __name__ == "__main__":
    sys.exit(
        run_benchmark(
            "experts",
            "Compares kinds of balancing of a mixture of experts, and Hugging Face's Trainer.",
            ExpertsBenchmarkOptions,
            report,
        )
    )
