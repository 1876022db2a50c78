"""The moving average of the weights on every layout, and what becomes of it."""

import shutil
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from llm.checkpoint.format import checkpoint_name, read_manifest
from llm.data.loader import StepBatch
from llm.errors import ConfigError
from llm.extensions.averaging.weight_average import WeightAverage
from llm.models.sampling import sample_text
from llm.parallel.base import AcceleratedStrategy
from llm.tools.checkpoints import main as checkpoints
from llm.trainers.gpt.config import check_config
from llm.trainers.gpt.extensions import GPTConfig
from llm.trainers.gpt.load_trained_model import load_trained_model
from llm.trainers.gpt.recorded_config import read_config
from llm.trainers.gpt.text_sample import SAMPLE_TOKENS
from tests.support.layouts import make_data_parallel
from tests.support.operations import Reads
from tests.support.ranks import run_ranks, values
from tests.support.recovery import last_counts, last_hash, weights_hash, without_times
from tests.support.training import Bench, Run

SHARDED = {"data_parallel_shard_size": 2}
LAYOUTS = {
    "FSDP2": (2, SHARDED),
    "PP2": (2, {"pipeline_parallel_size": 2}),
    "TP2": (2, {"tensor_parallel_size": 2}),
    "DP2 with K-FAC": (2, {"kfac": True}),
    "PP2xFSDP2": (4, {"pipeline_parallel_size": 2, **SHARDED}),
}
IN_CI = ("FSDP2",)
"""That of `make test-extended`; `make test-layouts` runs the others."""


@pytest.fixture(scope="module")
def bench(tmp_path_factory) -> Bench:
    return Bench(tmp_path_factory.mktemp("bench"))


def weights(run: Run, step: int, *, ema: bool) -> dict[str, torch.Tensor]:
    """The whole weights, or their average, of a checkpoint of any layout."""
    checkpoint = read_manifest(run.folder / "checkpoints" / checkpoint_name(step))
    model, _ = load_trained_model(read_config(run.folder), checkpoint, part="ema" if ema else None)
    return {name: p.detach() for name, p in model.named_parameters()}


def assert_average(run: Run, *, steps: int, decay: float) -> None:
    """Compare the average with the weighted mean of the weights after each step."""
    history = [weights(run, step, ema=False) for step in range(1, steps + 1)]
    factors = [decay ** (steps - step) for step in range(1, steps + 1)]
    average = weights(run, steps, ema=True)
    assert average.keys() == history[0].keys()
    for name, tensor in average.items():
        terms = [f * each[name].double() for f, each in zip(factors, history, strict=True)]
        torch.testing.assert_close(tensor.double(), sum(terms) / sum(factors), rtol=1e-5, atol=1e-7)


def test_the_average_by_tokens_halves_the_past_after_its_half_life(bench):
    options = {"max_train_steps": 5, "checkpointing_steps": 1, "learning_rate": 1e-2}
    run = bench.train_well("tokens", ema_tokens=2 * 4 * 32, **options)
    assert_average(run, steps=5, decay=0.5**0.5)  # two steps of 4 samples of 32 tokens


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(name, marks=pytest.mark.extended if name in IN_CI else pytest.mark.layouts)
        for name in LAYOUTS
    ],
)
def test_the_average_is_that_of_the_weights_on_any_layout(bench, layout):
    ranks, sizes = LAYOUTS[layout]
    options = {"max_train_steps": 4, "checkpointing_steps": 1, "learning_rate": 1e-2}
    options |= {"gradient_accumulation_steps": 2, "ema_decay": 0.5, "eval_ema": True}
    name = layout.replace(" ", "-")

    run = bench.train_well(name, ranks=ranks, eval_steps=2, export_ema=True, **options, **sizes)

    assert_average(run, steps=4, decay=0.5)
    average, exported = weights(run, 4, ema=True), load_file(run.folder / "model.safetensors")
    assert all(torch.equal(tensor, average[name]) for name, tensor in exported.items())
    # The losses of the average are those of the export, also while FSDP has gathered weights.
    alone = {"eval_only": True, "model_name_or_path": run.folder}
    expected = bench.train_well(f"{name}-eval", **alone).read_json("eval_results.json")
    results = run.read_json("all_results.json")
    assert results["eval_ema_loss"] == pytest.approx(expected["loss"], rel=1e-5)
    assert abs(results["eval_ema_loss"] - results["eval_loss"]) > 1e-3
    assert [r["step"] for r in run.metrics if "eval_ema_perplexity" in r] == [2, 4]
    # Two of these checkpoints, in shards, give the mean of their exports.
    folders = [bench.folder / f"{name}-{kind}" for kind in ("3", "4", "mean")]
    for step, folder in zip("34", folders, strict=False):
        assert checkpoints([str(run.folder), "--export", step, str(folder)]) == 0
    words = ["average", str(run.folder), "--last", "2", "--output", str(folders[2])]
    assert checkpoints(words) == 0
    third, fourth, mean = (load_file(folder / "model.safetensors") for folder in folders)
    assert mean.keys() == third.keys()
    for key, tensor in mean.items():
        assert torch.equal(tensor, ((third[key].double() + fourth[key]) / 2).float())


def test_the_exported_average_is_evaluated_and_writes_the_sample(bench):
    options = {"max_train_steps": 3, "eval_steps": 1, "ema_decay": 0.5, "learning_rate": 1e-2}
    run = bench.train_well("exported", export_ema=True, sample_prompt="The king", **options)

    assert [record["step"] for record in run.metrics if "eval_ema_loss" in record] == [3]
    loss = run.read_json("all_results.json")["eval_ema_loss"]
    assert f"validation loss of the average {loss:.4f}, " in run.output
    model = AutoModelForCausalLM.from_pretrained(run.folder)
    tokenizer = AutoTokenizer.from_pretrained(run.folder)
    prompt = {"prompt": "The king", "max_new_tokens": SAMPLE_TOKENS, "seed": 1}
    assert sample_text(model, tokenizer, **prompt) in run.output


@pytest.mark.parametrize(
    "layout", [{}, pytest.param({"ranks": 2, **SHARDED}, marks=pytest.mark.extended)]
)
def test_an_average_changes_nothing_else_and_is_resumed_to_the_same_bits(tmp_path, layout):
    bench = Bench(tmp_path)
    options = {"max_train_steps": 6, "checkpointing_steps": 2, "eval_steps": 3, **layout}
    plain = bench.train_well("plain", **options)
    options |= {"ema_decay": 0.9, "eval_ema": True}
    straight = bench.train_well("straight", **options)
    assert straight.losses == plain.losses
    assert weights_hash(straight.folder) == weights_hash(plain.folder)

    cut = bench.folder / "resumed"
    shutil.copytree(straight.folder, cut)
    shutil.rmtree(cut / "checkpoints" / checkpoint_name(6))
    resumed = bench.train_well("resumed", resume_from_checkpoint=True, **options)

    assert last_hash(resumed) == last_hash(straight)
    assert last_counts(resumed) == last_counts(straight)
    assert last_counts(resumed)["ema"] == {"mass": pytest.approx(1 - 0.9**6)}
    assert without_times(resumed) == without_times(straight)

    again = bench.train_well("resumed", eval_only=True, resume_from_checkpoint=True, **options)
    expected = resumed.read_json("all_results.json")
    assert again.read_json("eval_results.json")["ema_loss"] == expected["eval_ema_loss"]


@pytest.mark.layouts
def test_another_number_of_ranks_continues_the_average(bench):
    options = {"checkpointing_steps": 1, "ema_decay": 0.5, "global_batch_size": 8}
    bench.train_well("fewer", ranks=2, max_train_steps=3, **options, **SHARDED)
    run = bench.train_well("fewer", max_train_steps=6, resume_from_checkpoint=True, **options)
    assert "at step 3" in run.output
    assert_average(run, steps=6, decay=0.5)


def test_an_average_may_begin_in_a_branch(bench):
    parent = bench.train_well("parent", max_train_steps=6, checkpointing_steps=2)
    options = {"ema_tokens": "1K", "eval_ema": True, "checkpointing_steps": 1}
    run = bench.train_well("branch", branch_from=parent.folder / "4", max_train_steps=6, **options)
    assert "has no moving average of the weights: it begins here" in run.output
    after_5, average = weights(run, 5, ema=False), weights(run, 5, ema=True)
    assert all(torch.equal(tensor, average[name]) for name, tensor in after_5.items())


def test_an_average_begins_anew_wherever_a_checkpoint_has_none():
    """As where a run goes back to the checkpoint without one that it was resumed from."""
    weight = torch.nn.Parameter(torch.zeros(2))
    strategy = SimpleNamespace(local_parameters=[weight])
    average = WeightAverage(cast(AcceleratedStrategy, strategy), decay=0.5)
    batch = cast(StepBatch, SimpleNamespace(num_tokens=1))
    for value in (1.0, 2.0, 4.0):
        if value == 4.0:
            average.begin()
        weight.data.fill_(value)
        average.after_step(1, batch)
    assert average._averages[0].tolist() == [4.0, 4.0]


def reads_of_an_update() -> list[str]:
    strategy = make_data_parallel("no")
    average = WeightAverage(strategy, decay=0.9)
    with Reads() as reads:
        average.after_step(1, cast(StepBatch, SimpleNamespace(num_tokens=1)))
    return reads.seen


def test_an_average_reads_no_value_from_the_device():
    assert values(run_ranks(reads_of_an_update, 1)) == [[]]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"ema_decay": 0.9, "ema_tokens": 100}, "--ema_decay and --ema_tokens exclude each other"),
        ({"eval_ema": True}, "--eval_ema needs --ema_decay or --ema_tokens"),
        ({"ema_decay": 0.9, "data_parallel": "gossip"}, "--data_parallel gossip trains several"),
        ({"ema_tokens": 9, "data_parallel": "diloco"}, "--ema_tokens averages the weights of one"),
    ],
)
def test_an_average_that_cannot_be_is_refused(options, said):
    with pytest.raises(ConfigError, match=said):
        check_config(
            GPTConfig(model_type="gpt2", tokenizer_name="t", train_file="t.txt", **options)
        )
