"""The table of what ran where has each layout, precision and optimizer that the options allow."""

import json
import re

import pytest

from llm.config.options import fields
from llm.trainers.gpt.extensions import GPTConfig
from tests.support.package import ROOT

ROWS = json.loads((ROOT / "benchmarks" / "results" / "what_ran.json").read_text(encoding="utf-8"))
FIELDS = {field.name: field for field in fields(GPTConfig)}
CHOICES = (
    *("mixed_precision", "all_reduce_dtype", "moment_dtype", "optimizer"),
    *("data_parallel", "kfac_method", "pipeline_schedule", "fused_kernels"),
)
"""Options with a row for each choice."""


def listed_values(name: str) -> set[str | None]:
    return {row["options"][name] for row in ROWS if name in row["options"]}


@pytest.mark.parametrize("name", CHOICES)
def test_every_choice_of_an_option_has_a_row(name):
    assert {*FIELDS[name].choices} - {"fp32"} <= listed_values(name)


def test_every_division_of_a_model_has_a_row():
    names = {name for name, field in FIELDS.items() if field.option.group == "Parallelism"}
    assert {"tensor_parallel_size", "virtual_stages"} <= names
    named_options = {name for row in ROWS for name in row["options"]}
    assert names <= named_options
    assert named_options <= FIELDS.keys()


def test_what_ran_on_gpus_has_a_date():
    for row in ROWS:
        for cell in (row["gpu"], row["gpus"]):
            is_dated = re.search(r"20\d\d-\d\d-\d\d", cell) is not None
            assert is_dated or cell in ("never run", "-"), row["what"]
