"""Blocks compiled one by one train as uncompiled ones, in every layout."""

import re

import pytest

from tests.support.ranks import run_ranks, values
from tests.support.training import NO_DROPOUT, Bench, Run, assert_refused

MORE = pytest.mark.layouts


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    return Bench(tmp_path_factory.mktemp("compile"), **NO_DROPOUT)


def train_traced(argv):
    """Train with blocks that are traced but not optimized, which takes seconds, not minutes."""
    import torch

    from llm.trainers.gpt.main import main

    compile_fully = torch.compile
    torch.compile = lambda function, **options: compile_fully(function, backend="eager", **options)
    code = main(argv)
    counters = torch._dynamo.utils.counters
    return code, counters["stats"]["unique_graphs"], dict(counters["graph_break"])


@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        (1, {"sample_steps": 2}),
        pytest.param(1, {"kfac": True}, marks=MORE),
        pytest.param(1, {"activation_checkpointing": "selective"}, marks=MORE),
        pytest.param(
            2,
            {"data_parallel_shard_size": 2, "activation_checkpointing": "full"},
            marks=pytest.mark.extended,
        ),
        pytest.param(
            2, {"pipeline_parallel_size": 2, "gradient_accumulation_steps": 2}, marks=MORE
        ),
        pytest.param(1, {}, marks=MORE),
        pytest.param(1, {"activation_checkpointing": "full"}, marks=MORE),
        pytest.param(2, {}, marks=MORE),
        pytest.param(2, {"data_parallel_shard_size": 2}, marks=MORE),
        pytest.param(2, {"tensor_parallel_size": 2}, marks=MORE),
        pytest.param(2, {"tensor_parallel_size": 2, "sequence_parallel": True}, marks=MORE),
        pytest.param(2, {"data_parallel": "gossip"}, marks=MORE),
    ],
    ids=str,
)
def test_compiled_blocks_train_as_uncompiled_ones(bench, request, ranks, options):
    name = re.sub(r"\W+", "-", request.node.name)
    options = {"max_train_steps": 3, "eval_steps": 2, **options}
    plain = bench.train_well(f"{name}-plain", ranks=ranks, **options)
    command = bench.command(f"{name}-compiled", torch_compile=True, **options)
    outcomes = run_ranks(train_traced, ranks, command)
    for code, graphs, breaks in values(outcomes):
        assert code == 0
        assert breaks == {}
        # One for all blocks: of a training step, of an evaluation, and for other shapes.
        assert 1 <= graphs <= 4
    compiled = Run(bench.folder / f"{name}-compiled", outcomes)
    # With compiled blocks K-FAC updates all factors in the same steps, not in turn.
    rel = 1e-3 if "kfac" in options else 1e-4
    for key in ("loss", "eval_loss"):
        ours, theirs = ([m[key] for m in run.metrics if key in m] for run in (compiled, plain))
        assert ours == pytest.approx(theirs, rel=rel)


@pytest.mark.parametrize(
    ("dropout", "options", "words"),
    [
        ({"attn_pdrop": 0.1}, {}, "--tensor_parallel_size would drop the same units on every rank"),
        pytest.param(
            {"resid_pdrop": 0.1},
            {"sequence_parallel": True},
            "--config_overrides resid_pdrop=0",
            marks=pytest.mark.extended,
        ),
    ],
)
def test_compiled_blocks_that_ranks_divide_have_no_dropout(tmp_path, dropout, options, words):
    assert_refused(
        Bench(tmp_path, **(NO_DROPOUT | dropout)),
        ranks=2,
        words=["--torch_compile with", "set --no_torch_compile", words],
        tensor_parallel_size=2,
        torch_compile=True,
        **options,
    )
