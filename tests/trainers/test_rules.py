"""Which ways to divide a model go together: the table of the guide, cell by cell."""

import dataclasses
import re
from pathlib import Path

import pytest

from llm.errors import ConfigError
from llm.trainers.gpt.config import GPTConfig
from llm.trainers.gpt.rules import check

GUIDE = Path(__file__).parents[2] / "docs/guides/parallelism.md"
OPTIONS = {
    "shards": [{"data_parallel_shard_size": 2}],
    "tensor": [{"tensor_parallel_size": 2}],
    "pipeline": [{"pipeline_parallel_size": 2}],
    "context": [{"context_parallel_size": 2}],
    "`--kfac`": [{"kfac": True}],
    "`--optimizer muon`, `soap`": [{"optimizer": "muon"}, {"optimizer": "soap"}],
    "`--data_parallel gossip`, `diloco`": [
        {"data_parallel": "gossip"},
        {"data_parallel": "diloco"},
    ],
    "`--sample_steps`": [{"sample_steps": 5}],
    "`--torch_compile`": [{"torch_compile": True}],
    "`--mixed_precision bf16`, `fp16`": [{"mixed_precision": "bf16"}, {"mixed_precision": "fp16"}],
    "`--mixed_precision fp8`": [{"mixed_precision": "fp8"}],
}


def cells() -> list[tuple[str, str, str]]:
    table = GUIDE.read_text(encoding="utf-8").split("## Combinations")[1]
    lines = re.findall(r"(?m)^\|(.*)\|$", table)
    rows = [[cell.strip() for cell in line.split("|")] for line in lines]
    head = rows[0]
    return [
        (row[0], way, said)
        for row in rows[2:]
        for way, said in zip(head[1:], row[1:], strict=True)
        if said
    ]


def test_the_table_has_all_pairs_of_ways_to_parallelise():
    assert len(cells()) == 4 * 3 + 7 * 4
    assert {row for row, _, _ in cells()} == set(OPTIONS)


@pytest.mark.parametrize(("row", "way", "said"), cells(), ids=lambda value: str(value))
def test_exactly_the_combinations_that_the_table_excludes_are_refused(row, way, said):
    for options in OPTIONS[row]:
        config = GPTConfig(model_type="gpt2", tokenizer_name="t", train_file="t.txt", **options)
        config = dataclasses.replace(config, **OPTIONS[way][0])
        if said == "yes":
            check(config)
            continue
        with pytest.raises(ConfigError) as refusal:
            check(config)
        named = " ".join(f"--{name}" for name in (*options, *OPTIONS[way][0]))
        assert any(word in str(refusal.value) for word in named.split())
