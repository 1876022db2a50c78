"""The small trainings of the evidence: their inputs, their command lines, and how to compare two.

All train on the bytes of the text that ships with the package, so that nothing is downloaded or
tokenized.
"""

import array
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from llm.tools.evidence.layout_cases import expert_parallel_ranks
from llm.tools.quickstart import shipped_examples
from llm.tools.report.run_files import read_events, read_metrics

NUM_STEPS = 3
"""Steps of a training that is compared with another one."""
SAMPLES_PER_RANK = 2
_BLOCK_SIZE = 64
_KERNEL_LINES = ("world: ", "attention: ", "loss: ")
"""Beginnings of lines of a run's log, after date and time."""
_MAX_SAMPLES_ALONE = 64
_MIXTURE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "vocab_size": 2048,
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "moe_intermediate_size": 32,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}
IN_FLOAT32 = ("--mixed_precision", "no", "--no_tf32", "--no_torch_compile")
"""Options for a comparison with the rounding of float32 only."""


class CheckFailed(Exception):
    """A check has found a fault.

    Args:
        reason: The fault, as a sentence or the last lines of a program.
        figures: Figures of the check, by name.
    """

    def __init__(self, reason: str, figures: Mapping[str, Any] | None = None) -> None:
        super().__init__(reason)
        self.figures = dict(figures or {})


class Inputs:
    """Files that the trainings read.

    Args:
        folder: Folder for them, which all ranks share.
        num_ranks: Number of ranks, which may divide the experts of the mixture.
    """

    def __init__(self, folder: Path, num_ranks: int) -> None:
        self._examples = shipped_examples()
        self._tokens = folder / "tokens.bin"
        self._mixture = folder / "mixture.json"
        text = (self._examples / "data" / "shakespeare.txt").read_bytes()
        self._tokens.write_bytes(array.array("H", list(text)).tobytes())
        expert_ranks = expert_parallel_ranks(num_ranks)
        num_experts = expert_ranks * math.ceil(4 / expert_ranks)
        self._mixture.write_text(json.dumps({**_MIXTURE, "num_experts": num_experts}))

    def trainer_arguments(self, folder: Path, *options: str) -> list[str]:
        """Return the arguments of Python that start the trainer in a folder with some options."""
        return [
            *("-m", "llm.trainers.gpt", "--output_dir", str(folder)),
            *("--tokenizer_name", str(self._examples / "tokenizer")),
            *("--data_path", str(self._tokens), "--split", "100,0,0"),
            *("--learning_rate", "1e-3", "--lr_scheduler_type", "constant", "--seed", "1"),
            *("--report_to", "none", "--timeout", "60"),
            *options,
        ]

    def tiny_trainer_arguments(
        self,
        folder: Path,
        *options: str,
        num_ranks: int,
        num_steps: int = NUM_STEPS,
        has_experts: bool = False,
        is_alone: bool = False,
    ) -> list[str]:
        """Return the arguments of Python that train a tiny GPT-2 or mixture of experts.

        Args:
            folder: Folder of the run.
            options: Layout, precision and checkpoints.
            num_ranks: Number of ranks; the global batch has two samples for each.
            num_steps: Optimizer steps.
            has_experts: Whether the model is a mixture of experts.
            is_alone: Whether one rank computes the whole batch.
        """
        config = self._mixture if has_experts else self._examples / "gpt-tiny" / "config.json"
        global_batch_size = SAMPLES_PER_RANK * num_ranks
        micro_batch_size = 1
        if is_alone:
            sizes = range(1, _MAX_SAMPLES_ALONE + 1)
            micro_batch_size = max(size for size in sizes if global_batch_size % size == 0)
        return self.trainer_arguments(
            folder,
            *("--config_name", str(config), "--block_size", str(_BLOCK_SIZE)),
            *("--global_batch_size", str(global_batch_size)),
            *("--per_device_train_batch_size", str(micro_batch_size)),
            *("--max_train_steps", str(num_steps), "--logging_steps", "1"),
            *("--device_peak_tflops", "1"),  # otherwise it is measured
            # Where a gradient is tiny, a smaller epsilon would magnify its rounding errors.
            *("--eps", "1e-4"),
            *options,
        )


def read_steps(folder: Path) -> dict[int, dict[str, float]]:
    """Return the metrics of a run by step.

    Raises:
        CheckFailed: It has none.
    """
    records, _ = read_metrics(folder / "metrics.jsonl")
    steps = {int(record["step"]): record for record in records if "loss" in record}
    if not steps:
        raise CheckFailed("one of the runs to compare is missing, or has logged no step.")
    return steps


def read_device(folder: Path) -> str | None:
    """Return the kind of device that a run has trained on; None if it has not recorded it."""
    events = read_events(folder / "events.jsonl")
    devices: list[str] = [event["device"] for event in events if event["event"] == "start"]
    return devices[-1] if devices else None


def read_kernels(folder: Path) -> str:
    """Return what a run has logged about its precision, compilation, attention and loss."""
    text = (folder / "log.txt").read_text(encoding="utf-8")
    lines = [line.partition(" ")[2].partition(" ")[2] for line in text.splitlines()]
    return "; ".join(line for line in lines if line.startswith(_KERNEL_LINES))


def compare_steps(
    folder: Path, reference: Path, *, tolerance: float, steps: Sequence[int]
) -> dict[str, Any]:
    """Compare losses and gradient norms of two runs.

    Args:
        folder: Folder of the run to check.
        reference: Folder of the run to compare with.
        tolerance: Relative difference that a loss may have. Gradient norms may have ten times that.
        steps: Steps to compare.

    Returns:
        The losses, the largest relative differences, and the tolerance.

    Raises:
        CheckFailed: A difference is larger, or a step is missing.
    """
    records, reference_records = read_steps(folder), read_steps(reference)
    missing_steps = [step for step in steps if not (step in records and step in reference_records)]
    if missing_steps:
        raise CheckFailed(f"a run has not logged step {missing_steps[0]}.")
    loss_difference = _find_largest_difference(records, reference_records, "loss", steps)
    norm_difference = _find_largest_difference(records, reference_records, "grad_norm", steps)
    figures = {
        "losses": [records[step]["loss"] for step in steps],
        "reference_losses": [reference_records[step]["loss"] for step in steps],
        "loss_difference": loss_difference,
        "grad_norm_difference": norm_difference,
        "tolerance": tolerance,
    }
    # NaN is not smaller than anything.
    if not (loss_difference <= tolerance and norm_difference <= 10 * tolerance):
        raise CheckFailed(
            f"losses differ by {loss_difference:.2g} and gradient norms by {norm_difference:.2g} "
            f"(relative), with a tolerance of {tolerance:g} and {10 * tolerance:g}.",
            figures,
        )
    return figures


def _largest_number(numbers: Iterable[float]) -> float:
    """Return the largest of several numbers, or NaN if one of them is NaN."""
    return max(numbers, key=lambda number: (math.isnan(number), number))


def _find_largest_difference(
    records: Mapping[int, Mapping[str, float]],
    reference_records: Mapping[int, Mapping[str, float]],
    name: str,
    steps: Sequence[int],
) -> float:
    """Return the largest difference of a value in these steps, relative to the reference."""
    differences = []
    for step in steps:
        value, reference = records[step][name], reference_records[step][name]
        differences.append(abs(value - reference) / abs(reference))
    return _largest_number(differences)


def compare_weights(folder: Path, reference: Path, *, tolerance: float) -> dict[str, Any]:
    """Compare the exported weights of two runs.

    Args:
        folder: Folder of the run to check.
        reference: Folder of the run to compare with.
        tolerance: Largest absolute difference of a weight; 0 for equal bits.

    Raises:
        CheckFailed: A difference is larger, or the names differ.
    """
    from safetensors.torch import load_file

    weights, reference_weights = (
        load_file(path / "model.safetensors") for path in (folder, reference)
    )
    if weights.keys() != reference_weights.keys():
        raise CheckFailed("the exported models have different names of weights.")
    difference = _largest_number(
        (weight.double() - reference_weights[name].double()).abs().max().item()
        for name, weight in weights.items()
    )
    figures = {"weight_difference": difference}
    if not difference <= tolerance:
        raise CheckFailed(
            f"weights differ by up to {difference:.2g}, with a tolerance of {tolerance:g}.", figures
        )
    return figures
