"""Samples of what the model writes, TensorBoard's table of runs, and the commands in the log."""

import contextlib
import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams.metadata import parse_session_start_info_plugin_data

from llm.data.batch_plan import BatchPlan
from llm.trainers.gpt import commands
from llm.trainers.gpt.extensions import GPTConfig
from llm.trainers.gpt.run_log import _find_options_without_effect
from llm.trainers.gpt.text_sample import log_sample
from tests.support.models import tiny_config, tiny_model
from tests.support.recovery import weights_hash, without_times
from tests.support.tokenizers import tiny_tokenizer
from tests.support.training import Bench

TABLE = "_hparams_/session_start_info"


def test_samples_are_logged_without_changing_the_training(tmp_path):
    bench = Bench(tmp_path)
    options = {"max_train_steps": 6, "report_to": "tensorboard", "learning_rate": 0.003}
    quiet = bench.train_well("quiet", **options)
    told = bench.train_well("told", sample_steps=3, sample_prompt="The king", **options)

    assert without_times(told) == without_times(quiet)
    assert weights_hash(told.folder) == weights_hash(quiet.folder)
    assert told.output.count("a sample at step 3:\n\nThe king") == 1
    assert told.output.count("a sample at step 6:\n\nThe king") == 1
    board = EventAccumulator(str(told.folder / "tensorboard"))
    board.Reload()
    samples = board.Tensors("sample/text_summary")
    assert [sample.step for sample in samples] == [3, 6]
    assert b"The king" in samples[0].tensor_proto.string_val[0]

    content = board.SummaryMetadata(TABLE).plugin_data.content
    options = parse_session_start_info_plugin_data(content).hparams
    assert options["learning_rate"].number_value == 0.003
    assert options["lr_scheduler_type"].string_value == "constant"


@pytest.mark.parametrize(
    ("ranks", "micro_batches", "expected"),
    [
        (1, 2, [("all_reduce_dtype bf16", "with one rank")]),
        (2, 1, [("unsharded_gradients", "with one micro-batch per step")]),
        (2, 2, []),
    ],
)
def test_options_of_messages_that_are_not_sent_are_named(ranks, micro_batches, expected):
    config = GPTConfig(all_reduce_dtype="bf16", unsharded_gradients=True)
    plan = BatchPlan(
        global_batch_size=2 * ranks * micro_batches,
        micro_batch_size=2,
        world_size=ranks,
        total_samples=8,
        num_windows=8,
    )
    run: Any = SimpleNamespace(config=config, batch_plan=plan)
    strategy: Any = SimpleNamespace(world_size=ranks)
    assert list(_find_options_without_effect(run, strategy)) == expected


def test_a_model_that_has_diverged_has_no_sample_and_trains_on(caplog):
    model = tiny_model(tiny_config("gpt2"))
    with torch.no_grad():
        model.get_input_embeddings().weight.fill_(math.nan)
    config = GPTConfig(sample_prompt="The king")
    run: Any = SimpleNamespace(config=config, tokenizer=tiny_tokenizer(), seed=1)
    strategy: Any = SimpleNamespace(
        averaged=contextlib.nullcontext, autocast=contextlib.nullcontext, rank=0
    )

    log_sample(run, strategy, model, step=3, should_stop=lambda: False)

    (message,) = caplog.messages
    assert "its weights are not finite" in message
    assert model.training


@pytest.mark.extended
def test_a_sample_without_a_prompt_begins_a_text(tmp_path):
    run = Bench(tmp_path).train_well("run", max_train_steps=2, sample_steps=2, ranks=2)
    assert run.output.count("a sample at step 2:") == 1


def test_a_printed_command_starts_as_many_ranks_and_can_be_pasted(monkeypatch):
    monkeypatch.setattr(commands, "python_command", lambda: "python")
    words = ("--config", "runs/with späces/config.toml")
    trainer = "-m llm.trainers.gpt --config 'runs/with späces/config.toml'"
    local = f"torchrun --standalone --nproc_per_node 8 {trainer}"
    assert commands.start_command(8, *words) == local
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    nodes = "torchrun --nnodes 2 --rdzv_backend c10d --rdzv_endpoint HOST:PORT --nproc_per_node 4"
    assert commands.start_command(8, *words) == f"{nodes} {trainer}"
    # Tasks of srun or mpiexec are ranks themselves.
    for name, value in {"PROCID": "0", "LOCALID": "0", "STEP_NUM_TASKS": "8"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    assert commands.start_command(8, *words) == f"srun -n 8 python {trainer}"
    for name in ("PMI_RANK", "PMI_LOCAL_RANK", "MPI_LOCALRANKID"):
        monkeypatch.setenv(name, "0")
    monkeypatch.setenv("PMI_SIZE", "8")  # as Cray's srun sets it too
    assert commands.start_command(8, *words) == f"srun -n 8 python {trainer}"
    monkeypatch.delenv("SLURM_PROCID")
    assert commands.start_command(8, *words) == f"mpiexec -n 8 python {trainer}"


def test_a_printed_command_starts_the_programs_of_this_environment(tmp_path, monkeypatch):
    command = "generate runs/tiny"
    run = Path("runs/tiny")
    (tmp_path / "my env").mkdir()
    monkeypatch.setattr(sys, "executable", str(tmp_path / "my env/python"))
    monkeypatch.chdir(tmp_path)

    alone = commands.generate_command(GPTConfig(), run)
    (tmp_path / "my env/llm-trainers").touch(mode=0o755)
    installed = commands.generate_command(GPTConfig(), run)
    monkeypatch.setenv("PATH", str(tmp_path / "my env"))
    active = commands.generate_command(GPTConfig(), run)

    assert alone == f"'my env/python' -m llm {command}"
    assert installed == f"'my env/llm-trainers' {command}"
    assert active == f"llm-trainers {command}"


def test_printed_commands_do_not_take_a_folder_for_an_option(monkeypatch):
    monkeypatch.setattr(commands, "program_command", lambda program: ["llm-trainers", program])
    run = Path("-dash")
    assert commands.generate_command(GPTConfig(), run) == "llm-trainers generate ./-dash"
    assert commands.resume_command(GPTConfig(), run, 1).endswith(
        " --config ./-dash/config.toml --resume_from_checkpoint"
    )
    inspect = "llm-trainers inspect ./-dash --step 3"
    assert commands.inspect_command(run, 3) == inspect


def test_a_stopped_run_is_pushed_after_its_resume(monkeypatch):
    monkeypatch.setattr(commands, "program_command", lambda program: ["llm-trainers", program])
    config = GPTConfig(push_to_hub=True, hub_model_id="someone/tiny")
    assert commands.resume_command(config, Path("runs/tiny"), 1) == (
        "llm-trainers train --config runs/tiny/config.toml --resume_from_checkpoint "
        "--push_to_hub --hub_model_id=someone/tiny"
    )
