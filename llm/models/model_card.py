"""The model card of an exported model: metadata for the Hub, and a page for readers."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from llm.models.mixtures import mixture_size
from llm.runtime.files import write_whole

if TYPE_CHECKING:
    from huggingface_hub import EvalResult
    from transformers import PreTrainedModel

_HUB_NAME_PATTERN = re.compile(r"[\w.-]+(/[\w.-]+)?")
_LIMITATIONS = (
    "This is a base model: it continues text, and was not trained to follow instructions or to be "
    "safe. It repeats errors and biases of its training text. It was not evaluated beyond the "
    "results in this card."
)


@dataclass(frozen=True, kw_only=True)
class Card:
    """The content of a model card.

    Attributes:
        name: The model's name.
        rows: The table about the training, in order.
        license: The Hub's identifier of the license; None if no license was chosen.
        languages: Codes of the languages of the text.
        dataset: Name of the data set on the Hub; None if the data are from elsewhere. A folder is
            left out of the metadata.
        base_model: Source of pretrained weights, a name on the Hub or a path (left out of the
            metadata); None for random weights.
        validation: Description of the validation data.
        results: Results on the validation data by name; infinite ones and NaN are left out.
        task_results: Results of tasks by task and metric, such as {"cloze": {"acc": 0.4}}.
        command: The command that trains the model again.
        options: Contents of the command's `config.toml`, as TOML; "" if it is not sufficient.
        software: The versions of the programs, and the number of ranks.
    """

    name: str
    rows: Mapping[str, object]
    license: str | None = None
    languages: Sequence[str] = ()
    dataset: str | None = None
    base_model: str | None = None
    validation: str = ""
    results: Mapping[str, float] = field(default_factory=dict)
    task_results: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    command: str = ""
    options: str = ""
    software: str = ""


def mixture_rows(model: "PreTrainedModel") -> dict[str, object]:
    """Return the rows about the experts of a mixture; none for a dense model."""
    size = mixture_size(model)
    if size is None:
        return {}
    return {"active parameters": f"{size.active:,}", "experts": size.describe()}


def write_model_card(folder: Path, card: Card) -> None:
    """Write the model card of an exported model to `README.md` in its folder."""
    table_rows = "".join(
        f"| {name} | {_format_cell(value)} |\n" for name, value in card.rows.items()
    )
    license_line = "" if card.license else "\nNo license has been chosen for this model.\n"
    reproduce_section = (
        f"\n## Reproduce\n\nWith {card.software}:\n\n```bash\n{card.command}\n```\n\n"
        f"`config.toml` has\n\n```toml\n{card.options}```\n"
    )
    write_whole(
        folder / "README.md",
        f"---\n{_format_metadata(card)}---\n\n# {_format_cell(card.name)}\n\n"
        "A causal language model, pretrained with llm-trainers. Load it with\n"
        "`transformers.AutoModelForCausalLM.from_pretrained` and\n"
        "`transformers.AutoTokenizer.from_pretrained`.\n"
        f"{license_line}\n## Training\n\n| | |\n| --- | --- |\n{table_rows}"
        f"\n## Limitations\n\n{_LIMITATIONS}\n{reproduce_section if card.options else ''}",
    )


def _format_metadata(card: Card) -> str:
    """Return the card's metadata as YAML."""
    from huggingface_hub import ModelCardData  # slow to import

    results = _collect_eval_results(card)
    dataset_name = _hub_name(card.dataset)
    metadata = ModelCardData(
        language=list(card.languages) or None,
        license=card.license or None,
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["text-generation", "llm-trainers"],
        datasets=[dataset_name] if dataset_name else None,
        base_model=_hub_name(card.base_model),
        model_name=card.name if results else None,
        eval_results=results or None,
    )
    metadata_yaml: str = metadata.to_yaml()
    return metadata_yaml.rstrip("\n") + "\n"


def _collect_eval_results(card: Card) -> "list[EvalResult]":
    """Return the finite results in the format of the Hub's model index."""
    eval_results = _make_dataset_results(
        card.results,
        dataset_type=_hub_name(card.dataset) or "text",
        dataset_name=card.validation,
        split="validation",
    )
    for task, value_by_metric in card.task_results.items():
        eval_results += _make_dataset_results(
            value_by_metric, dataset_type=task, dataset_name=task, split=None
        )
    return eval_results


def _make_dataset_results(
    value_by_metric: Mapping[str, float], *, dataset_type: str, dataset_name: str, split: str | None
) -> "list[EvalResult]":
    """Return the finite results on one data set; the Hub refuses infinite values and NaN."""
    from huggingface_hub import EvalResult  # slow to import

    return [
        EvalResult(
            task_type="text-generation",
            dataset_type=dataset_type,
            dataset_name=dataset_name,
            dataset_split=split,
            metric_type=metric,
            metric_value=value,
        )
        for metric, value in value_by_metric.items()
        if math.isfinite(value)
    ]


def _hub_name(name: str | None) -> str | None:
    """Return a name if it can be a Hub name and is not a local file or folder."""
    if name is None or not _HUB_NAME_PATTERN.fullmatch(name) or Path(name).exists():
        return None
    return name


def _format_cell(value: object) -> str:
    """Return a value as one line of Markdown that cannot end a table's cell."""
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    return " ".join(text.replace("|", "\\|").split())
