"""Compiled blocks have a graph for each shape of a batch, whichever shape comes first."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._inductor.compile_fx as inductor_compiler
import torch._inductor.config as inductor
import torch.distributed as dist
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.nn.parallel import DistributedDataParallel

from llm.models.compilation import compile_blocks, make_compilation_reproducible
from llm.models.loss import LanguageModelLoss
from tests.support.models import tiny_config, tiny_model


@pytest.fixture
def batch_sizes(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int | torch.SymInt]]:
    """Batch size of each graph that is made, symbolic if it is any; graphs run unoptimized."""
    sizes: list[int | torch.SymInt] = []
    compile_fully = torch.compile

    def backend(graph: GraphModule, inputs: list[Tensor | int]) -> GraphModule:
        traced = (node.meta.get("example_value") for node in graph.graph.nodes)
        sizes.append(next(value.shape[0] for value in traced if is_hidden(value)))
        return graph

    monkeypatch.setattr(
        torch, "compile", lambda call, **options: compile_fully(call, backend=backend, **options)
    )
    torch._dynamo.reset()
    yield sizes
    torch._dynamo.reset()


def is_hidden(value: object) -> bool:
    """Whether it is [batch, length, width]."""
    return isinstance(value, Tensor) and not isinstance(value, nn.Parameter) and value.dim() == 3


def run(loss: LanguageModelLoss, size: int, *, training: bool) -> None:
    tokens = torch.zeros((size, 8), dtype=torch.long)
    with torch.set_grad_enabled(training):
        objective, _ = loss.train(training)(tokens, tokens)
    if training:
        objective.backward()


def test_an_evaluation_before_training_leaves_graphs_of_fixed_shapes(batch_sizes):
    model = tiny_model(tiny_config("gpt2"))
    compile_blocks(model)
    loss = LanguageModelLoss(model)
    for _ in range(2):
        run(loss, 2, training=False)
        run(loss, 4, training=True)
    assert batch_sizes == [2, 4]  # one graph each, for all blocks
    assert {type(size) for size in batch_sizes} == {int}


@pytest.mark.extended
def test_more_shapes_than_pytorchs_limit_are_compiled(batch_sizes):
    model = tiny_model(tiny_config("gpt2"))
    compile_blocks(model)
    loss = LanguageModelLoss(model)
    for size in range(2, 14):
        run(loss, size, training=True)
    assert batch_sizes == list(range(2, 14))


def test_blocks_with_fused_backward_passes_share_one_graph(monkeypatch):
    pytest.importorskip("triton", reason="fused backward passes are Triton kernels")
    graphs: list[GraphModule] = []

    def record(graph: GraphModule, inputs: list[Tensor], **_: Any) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(inductor_compiler, "compile_fx", record)
    torch._dynamo.reset()
    model = tiny_model(tiny_config("gpt2", n_layer=4), fused_gelu=True)
    loss = LanguageModelLoss(model)
    compile_blocks(model, fuse_backward=True)
    run(loss, 2, training=False)
    assert len(graphs) == 2  # of the blocks, and of the last norm
    torch._dynamo.reset()


def test_buckets_of_data_parallelism_do_not_divide_the_graph_of_a_block(batch_sizes, monkeypatch):
    monkeypatch.setattr(dist, "_DEFAULT_FIRST_BUCKET_BYTES", 1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = tiny_model(tiny_config("gpt2"))
        loss = LanguageModelLoss(model)
        compile_blocks(model)
        replica: Any = DistributedDataParallel(loss, bucket_cap_mb=1e-6)
        run(replica, 2, training=True)
    finally:
        dist.destroy_process_group()
    assert batch_sizes == [2]  # one graph for all blocks


def test_a_deterministic_run_rounds_as_the_model_and_times_no_kernel():
    names = ("emulate_precision_casts", "shape_padding", "compile_threads")
    kernels = {"triton.autotune_pointwise": True, "triton.mix_order_reduction": True}
    # `monkeypatch` would delete the options at the end: they are not in the module's dictionary.
    with inductor.patch({name: getattr(inductor, name) for name in names} | kernels):
        make_compilation_reproducible()
        assert [getattr(inductor, name) for name in names] == [True, False, 1]
        assert not inductor.triton.autotune_pointwise
        assert not inductor.triton.mix_order_reduction
