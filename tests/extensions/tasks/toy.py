"""Small tasks with local data, and lm-eval's results on the model that a run exports."""

import importlib.util
import json
import math
import random
from pathlib import Path

import pytest
import yaml

from tests.support.training import WORDS

needs_library = pytest.mark.skipif(
    importlib.util.find_spec("lm_eval") is None, reason="needs the extra tasks (lm_eval)"
)


def write_task(folder: Path, name: str, **settings) -> Path:
    """A task on texts of its own; some contexts are longer than the model's 64 positions."""
    draw = random.Random(name)
    data = folder / f"{name}.jsonl"
    with data.open("w", encoding="utf-8") as file:
        for length in (0, 3, 5, 8, 13, 30, 90):
            texts = [" ".join(draw.choices(WORDS, k=k)) for k in (length, 1, 2, 3)]
            row = {"context": texts[0], "choices": texts[1:], "answer": length % 3}
            file.write(json.dumps(row | {"whole": " ".join(texts)}) + "\n")
    task = {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}},
        "test_split": "test",
        "doc_to_text": "context",
        "doc_to_target": "{{choices[answer]}}",
        **settings,
    }
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(task), encoding="utf-8")
    return path


def metric(name: str, aggregation: str = "mean") -> dict[str, object]:
    return {"metric": name, "aggregation": aggregation, "higher_is_better": True}


CHOICE = {
    "output_type": "multiple_choice",
    "doc_to_choice": "choices",
    "doc_to_target": "answer",
    "metric_list": [metric("acc"), metric("acc_norm"), metric("brier_score", "brier_score")],
}


def by_lm_eval(model: Path, files: list[Path]) -> dict[str, float]:
    """What lm-eval finds with its own class for the models of transformers."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    found = lm_eval.simple_evaluate(
        model="hf",
        model_args={"pretrained": str(model), "dtype": "float32"},
        tasks=[str(file) for file in files],
        task_manager=TaskManager(include_defaults=False),
        device="cpu",
        batch_size=2,
        bootstrap_iters=0,
    )
    return {
        f"task_{task}/{key.removesuffix(',none')}": value
        for task, metrics in found["results"].items()
        for key, value in metrics.items()
        if "," in key and value != "N/A"
    }


def equal(found: dict[str, float], expected: dict[str, float]) -> bool:
    """Whether results agree to 1e-6, perplexities by their logarithms, which are what is summed."""

    def comparable(results: dict[str, float]) -> dict[str, float]:
        return {k: math.log(v) if "perplexity" in k else v for k, v in results.items()}

    return comparable(found) == pytest.approx(comparable(expected), rel=1e-6)


def of_tasks(record: dict[str, float]) -> dict[str, float]:
    return {key: value for key, value in record.items() if key.startswith("task_")}
