"""Norms by layer and attention logits: against direct computation, on layouts, and in runs."""

import math
from types import SimpleNamespace

import pytest
import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from llm.data.loader import MicroBatch
from llm.errors import ConfigError
from llm.extensions.norms import attention_logits
from llm.extensions.norms.norm_records import NormRecords
from llm.models.attention import disable_packing_detection
from llm.models.loss import LanguageModelLoss
from llm.optim.run_optimizer import OptimizerFactory
from llm.tools.report.panels import make_panels
from llm.tools.report.runs import read_runs
from tests.support import layouts
from tests.support.faults import Fault
from tests.support.made_up_run import Case, notes_of_a_record
from tests.support.models import still_model
from tests.support.ranks import run_ranks, values
from tests.support.training import NO_DROPOUT, Bench


def record(sizes: dict[str, int] | None, family: str = "gpt2") -> dict[str, float]:
    """The record of the second step of a tiny model, of which only this step is due."""
    disable_packing_detection()
    make_model = still_model if family == "mixtral" else layouts.make_divisible_model
    model = make_model(family)
    if sizes is None:
        strategy = layouts.AcceleratedStrategy(layouts.cpu_accelerator())
    else:
        strategy = layouts.make_strategy(sizes)
    strategy.prepare(LanguageModelLoss(model), OptimizerFactory(layouts.make_optimizer).make)
    records = NormRecords(strategy, interval_steps=2, has_several_models=False)
    for step in range(2):
        micro_batches, num_tokens = layouts.share(step, strategy, 2)
        records.before_step(step)
        strategy.set_learning_rate(1e-2)
        strategy.forward_backward(micro_batches, num_tokens=num_tokens)
        records._measure_gradients()
        strategy.optimizer_step(0.5)
        # The whole batch, so that every layout measures the logits of the same tokens.
        whole, _ = layouts.share(step, strategy, 1)
        records.after_step(step + 1, SimpleNamespace(micro_batches=whole))
        values = records._report(step + 1)
        assert bool(values) is (step == 1)
    strategy.close()
    return values


def group_of(name: str) -> str:
    if "wte" in name or "wpe" in name:
        return "embedding"
    if ".h." not in name:
        return "other"
    layer, rest = name.split(".h.")[1].split(".", 1)
    kind = "norms" if rest.startswith("ln") else "attention" if rest.startswith("attn") else "mlp"
    return f"{layer}.{kind}"


def direct_logits(
    model: torch.nn.Module, inputs: torch.Tensor, documents: torch.Tensor | None = None
) -> list[float]:
    """The largest product of a query and an earlier key, of one document, in GPT-2's layers."""
    found = []
    visible = torch.ones(inputs.shape[1], inputs.shape[1]).tril().bool().expand(len(inputs), -1, -1)
    if documents is not None:
        visible = visible & (documents[:, :, None] == documents[:, None, :])

    def observe(module, args, output):
        query, key, _ = output.unflatten(2, (3, model.config.n_head, -1)).unbind(2)
        scores = torch.einsum("bqhd,bkhd->bhqk", query, key) / math.sqrt(query.shape[-1])
        found.append(scores.masked_fill(~visible[:, None], -math.inf).max().item())

    handles = [block.attn.c_attn.register_forward_hook(observe) for block in model.transformer.h]
    with torch.no_grad():
        model(inputs)
    for handle in handles:
        handle.remove()
    return found


def test_a_record_is_what_a_plain_loop_computes():
    found = values(run_ranks(record, 1, {}))[0]
    model = layouts.make_divisible_model("gpt2")
    optimizer = layouts.make_optimizer(model)
    squares: dict[str, float] = {}

    def add(kind: str, name: str, tensor: torch.Tensor) -> None:
        key = f"norm_{kind}/{group_of(name)}"
        squares[key] = squares.get(key, 0.0) + tensor.double().square().sum().item()

    for step in range(2):
        inputs, labels = layouts.step_data(step)
        logits = model(inputs).logits.flatten(0, 1)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(logits, labels.flatten()).backward()
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        if step == 1:
            for name, p in model.named_parameters():
                add("gradient", name, p.grad)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    for name, p in model.named_parameters():
        add("weight", name, p.detach())
        add("update", name, p.detach() - before[name])
    expected = {key: math.sqrt(square) for key, square in squares.items()}
    for layer, logit in enumerate(direct_logits(model, inputs)):
        expected[f"max_attention_logit/{layer}"] = logit

    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert found[key] == pytest.approx(value, rel=1e-3), key


def logits_of_documents() -> tuple[list[float], list[float], list[float]]:
    """Logits of documents of two tokens: measured, directly computed, and of one document."""
    disable_packing_detection()
    attention_logits._MAX_LOGITS = 3 * layouts.BATCH * 4 * layouts.LENGTH  # three queries at once
    model = layouts.make_divisible_model("gpt2")
    strategy = layouts.AcceleratedStrategy(layouts.cpu_accelerator())
    strategy.prepare(LanguageModelLoss(model), OptimizerFactory(layouts.make_optimizer).make)
    inputs, labels = layouts.step_data(0)
    documents = (torch.arange(layouts.LENGTH) // 2).expand_as(inputs)
    found = attention_logits.measure_attention_logits(
        strategy,
        MicroBatch(inputs, labels, None, documents),
        layers={block.attn: layer for layer, block in enumerate(model.transformer.h)},
        num_layers=2,
    )
    assert ALL_ATTENTION_FUNCTIONS.get_interface("sdpa", None) is sdpa_attention_forward
    with torch.no_grad():
        expected = direct_logits(model, inputs, documents)
    return found.tolist(), expected, direct_logits(model, inputs)


def test_keys_of_other_documents_do_not_count():
    found, expected, of_one_document = values(run_ranks(logits_of_documents, 1))[0]
    assert found[0] == pytest.approx(expected[0], rel=1e-5)  # the inputs of the first layer
    assert found[0] < of_one_document[0] - 1e-3


def test_groups_are_in_the_order_of_the_model():
    groups = [
        key.partition("/")[2]
        for key in values(run_ranks(record, 1, {}, "llama"))[0]
        if key.startswith("norm_weight/")
    ]
    kinds = "attention", "mlp", "norms"
    layers = [f"{layer}.{kind}" for layer in range(2) for kind in kinds]
    assert groups == ["embedding", *layers, "other", "head"]


MORE = pytest.mark.layouts


@pytest.mark.parametrize(
    ("family", "ranks", "sizes"),
    [
        pytest.param("gpt2", 2, None, marks=pytest.mark.extended),
        ("gpt2", 2, {"shard": 2}),
        pytest.param("gpt2", 2, {"pipeline": 2}, marks=pytest.mark.extended),
        pytest.param("llama", 2, {"tensor": 2}, marks=MORE),
        pytest.param("llama", 2, {"context": 2}, marks=MORE),
        pytest.param("llama", 4, {"shard": 2}, marks=MORE),
        pytest.param("llama", 4, {"shard": 2, "tensor": 2}, marks=MORE),
        pytest.param("llama", 4, {"shard": 2, "pipeline": 2}, marks=MORE),
        pytest.param("llama", 4, {"shard": 2, "context": 2}, marks=MORE),
        pytest.param("mixtral", 2, {"shard": 2, "expert": 2}, marks=MORE),
        pytest.param("mixtral", 2, {"expert": 2}, marks=MORE),
    ],
)
def test_ranks_record_what_one_rank_does(family, ranks, sizes):
    expected = values(run_ranks(record, 1, {}, family))[0]
    for found in values(run_ranks(record, ranks, sizes, family)):
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            assert found[key] == pytest.approx(value, rel=1e-3), key


@pytest.fixture(scope="module")
def bench(tmp_path_factory) -> Bench:
    return Bench(tmp_path_factory.mktemp("bench"), lines=60, **NO_DROPOUT)


SHORT = {"per_device_train_batch_size": 2, "checkpointing_steps": 1, "max_train_steps": 4}


def records_of(run) -> list[dict[str, float]]:
    names = "step", "norm_", "max_attention_logit"
    lines = [line for line in run.lines if "norm_weight/embedding" in line]
    assert all(key.startswith(names) for line in lines for key in line)
    return lines


@pytest.fixture(scope="module")
def straight(bench):
    return bench.train_well("straight", log_norms=1, **SHORT)


def test_the_squares_of_gradients_add_up_to_the_norm_in_the_log(bench, straight):
    grad_norms = {line["step"]: line["grad_norm"] for line in straight.lines if "loss" in line}
    for line in records_of(straight):
        squares = [x**2 for key, x in line.items() if key.startswith("norm_gradient/")]
        assert math.sqrt(sum(squares)) == pytest.approx(grad_norms[line["step"]], rel=1e-5)
    assert [line["step"] for line in records_of(straight)] == [1, 2, 3, 4]


def test_records_neither_change_a_training_nor_its_other_lines(bench, straight):
    plain = bench.train_well("plain", **SHORT)
    every_second = bench.train_well("second", log_norms=2, logging_steps=2, **SHORT)

    assert plain.losses == straight.losses
    assert records_of(every_second) == [
        line for line in records_of(straight) if line["step"] % 2 == 0
    ]


def test_a_run_that_is_stopped_at_a_record_continues_with_it(bench, straight):
    stop = Fault(at="llm.trainers.gpt.loop:Trainer.train_step", what="SIGTERM", call=2)
    bench.train("cut", log_norms=1, faults=[stop], **SHORT)
    cut = bench.train_well("cut", log_norms=1, resume_from_checkpoint=True, **SHORT)

    assert "Stopped by SIGTERM" in (cut.folder / "log.txt").read_text()
    assert records_of(cut) == records_of(straight)


@pytest.mark.extended
def test_separate_documents_and_the_eager_kernel_are_measured(bench, straight):
    run = bench.train_well(
        "documents",
        log_norms=1,
        reset_attention_mask=True,
        attention_implementation="eager",
        **SHORT,
    )
    for line, other in zip(records_of(run), records_of(straight), strict=True):
        assert line.keys() == other.keys()
        assert line["norm_weight/0.mlp"] == pytest.approx(other["norm_weight/0.mlp"], rel=1e-2)


@pytest.mark.extended
def test_replicas_of_gossip_record_the_mean_of_their_squares(bench):
    options = {"data_parallel": "gossip", "ranks": 2, **SHORT}
    run = bench.train_well("gossip", log_norms=1, **options)
    assert len(records_of(run)) == 4


def test_an_interval_between_lines_of_the_log_is_refused(bench):
    with pytest.raises(ConfigError, match="--log_norms 15 is not a multiple of --logging_steps 10"):
        bench.read(log_norms=15, logging_steps=10)


def test_the_report_has_a_chart_of_each_kind_with_a_curve_for_each_group(straight):
    pytest.importorskip("bokeh")
    runs, _ = read_runs([straight.folder])
    panels = {panel.name: panel for panel in make_panels(runs) if panel.section == "Layers"}

    assert [*panels] == ["norm_weight", "norm_gradient", "norm_update", "max_attention_logit"]
    layers = [curve.layer for curve in panels["norm_weight"].curves]
    assert layers[:4] == ["embedding", "0.attention", "0.mlp", "0.norms"]
    assert [curve.layer for curve in panels["max_attention_logit"].curves] == ["0", "1"]


def test_a_record_never_waits_for_the_device():
    [notes] = values(run_ranks(notes_of_a_record, 1, Case(1)))
    assert notes.reads == []
    assert notes.launches["bmm"] > 0  # the products of queries and keys
