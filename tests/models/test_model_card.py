"""The card is one that huggingface_hub reads, and says what the Hub asks for."""

import math
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard

from llm.models.model_card import Card, write_model_card


def read(folder: Path, **content: Any) -> ModelCard:
    """A card as the Hub's library reads it; a model index that it does not understand raises."""
    write_model_card(folder, Card(**{"name": "tiny", "rows": {}} | content))
    return ModelCard.load(folder / "README.md", ignore_metadata_errors=False)


def test_what_nobody_has_said_is_not_in_the_metadata(tmp_path):
    data = read(tmp_path).data.to_dict()
    assert sorted(data) == ["library_name", "pipeline_tag", "tags"]


def test_the_model_index_has_each_finite_result_of_the_evaluation(tmp_path):
    data = read(
        tmp_path,
        dataset="wikitext",
        validation="wikitext (wikitext-2-raw-v1)",
        results={"loss": 2.5, "perplexity": math.inf, "accuracy": math.nan},
        task_results={"cloze": {"acc": 0.25}},
    ).data
    assert data.model_name == "tiny"
    assert [
        (found.dataset_type, found.dataset_name, found.metric_type, found.metric_value)
        for found in data.eval_results
    ] == [
        ("wikitext", "wikitext (wikitext-2-raw-v1)", "loss", 2.5),
        ("cloze", "cloze", "acc", 0.25),
    ]


@pytest.mark.parametrize("path", ["data/corpus", "here", "/data/corpus", "a/b/c"])
def test_local_data_and_models_are_not_linked_as_if_on_the_hub(tmp_path, monkeypatch, path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    for name in ("here", "data/corpus"):
        (tmp_path / name).touch()
    data = read(tmp_path, dataset=path, base_model=path).data
    assert (data.datasets, data.base_model) == (None, None)


def test_the_page_has_a_table_and_says_that_a_license_is_missing(tmp_path):
    rows = {"loss": 3.14159265, "data": "a | b\nc", "steps": 1000}
    text = read(tmp_path, name="tiny|gpt", rows=rows).text
    assert "# tiny\\|gpt" in text
    assert "| loss | 3.14159 |\n| data | a \\| b c |\n| steps | 1000 |" in text
    assert "## Limitations\n\nThis is a base model" in text
    assert "No license has been chosen" in text
    assert "## Reproduce" not in text
    assert "No license" not in read(tmp_path, license="mit").text
