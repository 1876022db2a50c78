"""Which options go together: the guide's table of layouts, and what is added to the options."""

import dataclasses
import re
from pathlib import Path

import pytest

from llm.config.duration import Duration
from llm.config.options import option
from llm.errors import ConfigError
from llm.parallel.options import PARALLELISM
from llm.trainers.gpt.config import check_config
from llm.trainers.gpt.extensions import GPTConfig

GUIDE = Path(__file__).parents[2] / "docs/guides/parallelism.md"
OPTIONS = {
    "shards": [{"data_parallel_shard_size": 2}],
    "tensor": [{"tensor_parallel_size": 2}],
    "pipeline": [{"pipeline_parallel_size": 2}],
    "context": [{"context_parallel_size": 2}],
    "experts": [{"data_parallel_shard_size": 2, "expert_parallel_size": 2}],
    "`--kfac`": [{"kfac": True}],
    "`--optimizer muon`, `normuon`, `soap`": [
        {"optimizer": "muon"},
        {"optimizer": "normuon"},
        {"optimizer": "soap"},
    ],
    "`--optimizer package.module:Class`": [{"optimizer": "torch.optim:Adamax"}],
    "`--data_parallel gossip`, `diloco`": [
        {"data_parallel": "gossip"},
        {"data_parallel": "diloco"},
    ],
    "`--sample_steps`": [{"sample_steps": 5}],
    "`--torch_compile`": [{"torch_compile": True}],
    "`--mixed_precision bf16`, `fp16`": [{"mixed_precision": "bf16"}, {"mixed_precision": "fp16"}],
    "`--mixed_precision fp8`": [{"mixed_precision": "fp8"}],
    "`--fp8_head`": [{"fp8_head": True, "mixed_precision": "bf16"}],
    "`--fused_kernels all`": [{"fused_kernels": "all"}],
}


def cells() -> list[tuple[str, str, str]]:
    section = GUIDE.read_text(encoding="utf-8").split("## Combinations")[1]
    lines = re.findall(r"(?m)^\|(.*)\|$", section)
    head, _, *rows = [[cell.strip() for cell in line.split("|")] for line in lines]
    for said, items in re.findall(r"(?m)^- (\w+) in all columns: (.*)$", section):
        rows += [[name, *[said] * len(head[1:])] for name in items.split("; ")]
    return [
        (row[0], way, said)
        for row in rows
        for way, said in zip(head[1:], row[1:], strict=True)
        if said
    ]


def test_the_table_has_all_pairs_of_ways_to_parallelise():
    assert len(cells()) == 5 * 4 + 10 * 5
    assert {row for row, _, _ in cells()} == set(OPTIONS)


@pytest.mark.parametrize(("row", "way", "said"), cells(), ids=lambda value: str(value))
def test_exactly_the_combinations_that_the_table_excludes_are_refused(row, way, said):
    for options in OPTIONS[row]:
        config = GPTConfig(model_type="gpt2", tokenizer_name="t", train_file="t.txt", **options)
        config = dataclasses.replace(config, **OPTIONS[way][0])
        if said == "yes":
            check_config(config)
            continue
        with pytest.raises(ConfigError) as refusal:
            check_config(config)
        named = " ".join(f"--{name}" for name in (*options, *OPTIONS[way][0]))
        assert any(word in str(refusal.value) for word in named.split())


BASE = {"model_type": "gpt2", "tokenizer_name": "t", "train_file": "t.txt"}
SIZES = [
    {"data_parallel_shard_size": 2},
    {"tensor_parallel_size": 2},
    {"context_parallel_size": 2},
    {"pipeline_parallel_size": 2},
    {"data_parallel_shard_size": 2, "expert_parallel_size": 2},
]


@pytest.mark.parametrize(
    "options",
    [
        *SIZES,
        {"data_parallel": "gossip"},
        {"data_parallel": "diloco"},
        {"mup": True, "mup_base_width": 64},
        {"kfac": True},
        {"moment_dtype": "bf16"},
        {"moment_update_steps": 4},
        {"betas": (0.9, 0.95)},
        {"eps": 1e-6},
        {"momentum": 0.9},
        {"nesterov": True},
        {"soap_update_steps": 5},
    ],
    ids=str,
)
def test_a_new_optimizer_is_refused_with_all_that_depends_on_it(options):
    check_config(GPTConfig(**BASE, optimizer="lion"))

    with pytest.raises(ConfigError) as refusal:
        check_config(GPTConfig(**BASE, optimizer="lion", **options))
    assert f"--{next(iter(options))}" in str(refusal.value)


@pytest.mark.parametrize("options", [*SIZES, {"kfac": True}], ids=str)
def test_a_new_precision_is_refused_with_all_that_depends_on_it(options):
    check_config(GPTConfig(**BASE, mixed_precision="fp4"))

    with pytest.raises(ConfigError, match=f"fp4 .* --{next(iter(options))}"):
        check_config(GPTConfig(**BASE, mixed_precision="fp4", **options))


@dataclasses.dataclass(frozen=True, kw_only=True)
class WiderConfig(GPTConfig):
    """With one more way to divide a model over ranks."""

    width_parallel_size: int = option(1, "Ranks that share widths.", group=PARALLELISM)


@pytest.mark.parametrize(
    "options",
    [
        *SIZES,
        {"data_parallel": "gossip"},
        {"data_parallel": "diloco"},
        {"kfac": True},
        {"mixed_precision": "fp8"},
        {"sample_steps": 5},
    ],
    ids=str,
)
def test_a_new_layout_is_refused_with_all_that_depends_on_it(options):
    check_config(WiderConfig(**BASE, width_parallel_size=2))

    with pytest.raises(ConfigError, match="--width_parallel_size"):
        check_config(WiderConfig(**BASE, width_parallel_size=2, **options))


@pytest.mark.parametrize(
    "options", [{"min_learning_rate": 1e-5}, {"warmup": Duration("5 steps")}], ids=str
)
def test_a_new_schedule_has_neither_warmup_nor_decay(options):
    check_config(GPTConfig(**BASE, lr_scheduler_type="cyclic"))

    with pytest.raises(ConfigError, match="--lr_scheduler_type cyclic"):
        check_config(GPTConfig(**BASE, lr_scheduler_type="cyclic", **options))
