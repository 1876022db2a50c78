"""Whole runs with --mup: in layouts, resumed, exported, and at the base width."""

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from llm.errors import ConfigError, LLMError
from llm.tools.checkpoints import main as checkpoints
from llm.trainers.gpt.load_trained_model import choose_checkpoint, load_trained_model
from llm.trainers.gpt.main import parse_args
from llm.trainers.gpt.recorded_config import read_config
from tests.support.recovery import weights_hash, without_times
from tests.support.training import NO_DROPOUT, Bench, Run

BASE = {"mup": True, "mup_base_width": 16, "mup_base_num_layers": 1, "mup_base_head_dim": 8}
COMMON = {"learning_rate": 1e-2, "weight_decay": 0.1, "checkpointing_steps": 10}


@pytest.fixture(scope="module")
def bench(tmp_path_factory) -> Bench:
    return Bench(tmp_path_factory.mktemp("mup"), **NO_DROPOUT)


@pytest.fixture(scope="module")
def alone(bench) -> Run:
    return bench.train_well("alone", per_device_train_batch_size=8, **BASE, **COMMON)


@pytest.mark.parametrize(
    ("micro_batch", "sizes"),
    [
        pytest.param(2, {"data_parallel_shard_size": 2}, id="FSDP2", marks=pytest.mark.extended),
        pytest.param(2, {}, id="DDP2", marks=pytest.mark.layouts),
        pytest.param(4, {"tensor_parallel_size": 2}, id="TP2", marks=pytest.mark.layouts),
        pytest.param(4, {"pipeline_parallel_size": 2}, id="PP2", marks=pytest.mark.layouts),
    ],
)
def test_two_ranks_train_as_one(bench, alone, micro_batch, sizes, request):
    run = bench.train_well(
        request.node.callspec.id,
        ranks=2,
        per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=2,
        **sizes,
        **BASE,
        **COMMON,
    )
    assert run.losses == pytest.approx(alone.losses, rel=1e-5)
    ours, theirs = (load_file(r.folder / "model.safetensors") for r in (run, alone))
    assert all((ours[name] - tensor).abs().max() < 1e-3 for name, tensor in theirs.items())


def test_at_the_base_width_a_run_is_bit_for_bit_that_without_mup(bench):
    plain = bench.train_well("plain", **COMMON)
    base = bench.train_well("base", mup=True, mup_base_width=32, **COMMON)
    assert without_times(base) == without_times(plain)
    assert weights_hash(base.folder) == weights_hash(plain.folder)


def test_both_exports_load_and_give_the_logits_of_training(alone, capsys):
    chosen = choose_checkpoint(alone.folder / "checkpoints", "latest", option="--checkpoint")
    trained, _ = load_trained_model(read_config(alone.folder), chosen)
    ids = torch.arange(20).view(2, 10)
    expected = trained.eval()(ids).logits
    target = alone.folder.parent / "exported"
    assert checkpoints([str(alone.folder), "--export", "latest", str(target)]) == 0
    for folder in (alone.folder, target):
        loaded = AutoModelForCausalLM.from_pretrained(folder)
        torch.testing.assert_close(loaded(ids).logits, expected, rtol=1e-5, atol=1e-5)


def test_a_resumed_run_keeps_its_base_model(bench, alone):
    changed = BASE | COMMON | {"mup_base_width": 32, "mup_base_num_layers": None}
    changed |= {"per_device_train_batch_size": 8, "resume_from_checkpoint": True}
    with pytest.raises(LLMError, match=r"mup_base_width.*mup_base_num_layers"):
        bench.read("alone", **changed)


def test_weights_of_another_attention_scale_are_no_start(bench, alone):
    with pytest.raises(LLMError, match=r"--mup_base_head_dim 8.*this run has None"):
        bench.read(init_from=alone.folder, mup=True, mup_base_width=16)


def test_an_evaluation_has_the_attention_scale_of_training(bench, alone):
    last = alone.folder / "checkpoints" / "step_00000020"
    options = {"eval_only": True, "resume_from_checkpoint": last}
    with pytest.raises(LLMError, match=r"--mup_base_head_dim 8.*this run has None"):
        bench.read(**options)
    run = bench.train_well("evaluated", **options, **BASE)
    expected = alone.read_json("all_results.json")["eval_loss"]
    assert run.read_json("eval_results.json")["loss"] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"mup": True}, "--mup needs --mup_base_width"),
        ({"mup_base_width": 16}, "--mup_base_width needs --mup"),
        ({"mup_base_num_layers": 2}, "--mup_base_num_layers needs --mup"),
        ({"mup": True, "mup_base_width": 0}, "--mup_base_width must be at least 1"),
        (BASE | {"optimizer": "soap"}, "none for --optimizer soap"),
        (BASE | {"optimizer": "sgd"}, "none for --optimizer sgd"),
        (BASE | {"kfac": True}, "none for --kfac"),
    ],
)
def test_options_that_do_not_go_with_mup_are_refused(bench, options, sentence):
    with pytest.raises(ConfigError, match=sentence):
        parse_args(bench.command("refused", **options))
