"""A run of a former version, with options that are aliases now or no longer exist, resumes."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from llm.checkpoint.format import write_manifest
from llm.checkpoint.load import list_checkpoints
from llm.config.duration import Duration
from llm.errors import ConfigError
from llm.trainers.gpt.main import parse_args
from tests.support.recovery import last_hash
from tests.support.training import Bench

OPTIONS = {
    "max_train_steps": 6,
    "num_warmup_tokens": 256,
    "num_decay_steps": 2,
    "lr_scheduler_type": "warmup_stable_decay",
    "checkpointing_steps": 3,
    "eval_tokens": 256,
}
FIXED = {
    "num_train_epochs": 3,
    "max_train_steps": 6,
    "max_train_samples": None,
    "max_train_tokens": None,
    "tokens_per_parameter": None,
    "num_warmup_steps": 0,
    "num_warmup_samples": None,
    "num_warmup_tokens": 256,
    "num_decay_steps": 2,
    "num_decay_tokens": None,
}
FREE = {"checkpointing_steps": 3, "eval_tokens": 256}
LOGGED = {"fused_gelu": True, "chunked_loss": True, "tied_gradients": True}
DURATIONS = ("max_duration", "warmup", "decay", "eval_interval", "save_interval")


def as_recorded_before(run: Path) -> None:
    """Rewrite config.toml and checkpoints as version 0.2.0 recorded them."""
    file = run / "config.toml"
    lines = [
        line
        for line in file.read_text(encoding="utf-8").splitlines()
        if line.split(" ")[0] not in DURATIONS
    ]
    former = {name: value for name, value in (FIXED | FREE | LOGGED).items() if value is not None}
    lines[:0] = [f"{name} = {str(value).lower()}" for name, value in former.items()]
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    for checkpoint in list_checkpoints(run / "checkpoints"):
        kept = {n: v for n, v in checkpoint.metadata["fixed"].items() if n not in DURATIONS}
        fixed, logged = kept | FIXED, checkpoint.metadata["logged"] | LOGGED
        metadata = checkpoint.metadata | {"fixed": fixed, "logged": logged}
        write_manifest(replace(checkpoint, metadata=metadata))


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    return Bench(tmp_path_factory.mktemp("bench"), lines=60)


@pytest.fixture(scope="module")
def straight(bench):
    return bench.train_well("straight", **OPTIONS)


@pytest.fixture
def former(bench, straight, tmp_path):
    """The same run, stopped after step 3 by the former version."""
    folder = bench.folder / "former"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(straight.folder, folder)
    shutil.rmtree(folder / "checkpoints" / "step_00000006")
    as_recorded_before(folder)
    return folder


def test_a_run_of_a_former_version_resumes_with_the_same_losses(bench, straight, former):
    run = bench.train_well("former", **OPTIONS, resume_from_checkpoint=True)
    assert "continues with other settings" not in run.output
    assert last_hash(run) == last_hash(straight)
    assert run.losses == straight.losses


def test_its_configuration_is_read_in_the_present_names(former):
    config = parse_args(["--config", str(former / "config.toml"), "--resume_from_checkpoint"])
    assert [getattr(config, name) for name in DURATIONS] == [
        *("6 steps", "256 tokens", "2 steps", "256 tokens", "3 steps")
    ]
    assert all(isinstance(getattr(config, name), Duration) for name in DURATIONS)


def test_a_removed_option_with_another_value_is_refused_in_one_sentence(former):
    file = former / "config.toml"
    file.write_text(file.read_text().replace("chunked_loss = true", "chunked_loss = false"))
    with pytest.raises(ConfigError) as caught:
        parse_args(["--config", str(file)])
    assert str(caught.value) == (
        f"{file}: chunked_loss was removed and is always true; remove the line."
    )
