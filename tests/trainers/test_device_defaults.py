"""Options whose default depends on the device: what a GPU gets, what resuming keeps."""

import dataclasses
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from llm.checkpoint.format import Checkpoint
from llm.errors import ConfigError
from llm.models.loss_chunks import LossChunks
from llm.parallel.accelerator import set_float32_precision
from llm.parallel.options import PrecisionOptions
from llm.trainers.gpt.extensions import GPTConfig
from llm.trainers.gpt.recorded_options import list_fixed_options
from llm.trainers.gpt.run_defaults import choose_device_options, choose_loss_chunks
from llm.trainers.gpt.training_run import make_checkpoint_metadata
from tests.support.training import Bench

CUDA, CPU = torch.device("cuda"), torch.device("cpu")
ROUTER = {"router_dtype": "fp32"}
FAST = {"mixed_precision": "bf16", "tf32": True, "torch_compile": True, **ROUTER}
PLAIN = {"mixed_precision": "no", "tf32": False, "torch_compile": False, **ROUTER}


@pytest.fixture
def gpu(monkeypatch):
    """A made-up GPU with bf16, Triton and a C compiler."""
    monkeypatch.setattr("torch.cuda.is_bf16_supported", lambda including_emulation=True: True)
    monkeypatch.setattr("llm.models.compilation.has_triton", lambda: True)
    monkeypatch.setenv("CC", "cc")


def saved(fixed: dict[str, object], logged: dict[str, object], **facts: object) -> Checkpoint:
    metadata = {"fixed": fixed, "logged": logged, **facts}
    return Checkpoint(
        path=Path("step"), step=1, saved_time="", world_size=1, metadata=metadata, files={}
    )


def test_a_gpu_gets_what_an_expert_would_set_and_a_cpu_does_not(gpu):
    assert choose_device_options(GPTConfig(), None, CUDA) == FAST
    assert choose_device_options(GPTConfig(), None, CPU) == PLAIN


def test_what_a_gpu_lacks_is_off(gpu, monkeypatch):
    monkeypatch.setattr(
        "torch.cuda.is_bf16_supported", lambda including_emulation=True: including_emulation
    )
    monkeypatch.delenv("CC")
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert choose_device_options(GPTConfig(), None, CUDA) == PLAIN | {"tf32": True}


def test_a_deterministic_run_is_not_compiled_on_a_gpu(gpu):
    assert choose_device_options(GPTConfig(deterministic=True), None, CUDA) == FAST | {
        "torch_compile": False
    }
    compiled = GPTConfig(deterministic=True, torch_compile=True)
    assert choose_device_options(compiled, None, CPU)["torch_compile"]
    with pytest.raises(ConfigError, match="--deterministic cannot be combined"):
        choose_device_options(compiled, None, CUDA)


def test_what_is_given_counts_on_every_device(gpu):
    assert choose_device_options(GPTConfig(**PLAIN), None, CUDA) == PLAIN
    assert choose_device_options(GPTConfig(**FAST), None, CPU) == FAST


def test_a_resumed_run_keeps_what_it_began_with(gpu):
    older = saved({"mixed_precision": "no", "seed": 1}, {"torch_compile": False, "tf32": False})
    newer = saved({"mixed_precision": "bf16", **ROUTER}, {"torch_compile": True, "tf32": True})
    assert choose_device_options(GPTConfig(), older, CUDA) == PLAIN | {"router_dtype": "model"}
    assert choose_device_options(GPTConfig(), newer, CPU) == FAST
    assert choose_device_options(GPTConfig(torch_compile=True), older, CUDA)["torch_compile"]
    # An evaluation has no run to go on with.
    assert choose_device_options(GPTConfig(eval_only=True), older, CUDA) == FAST


@pytest.fixture
def h200(monkeypatch):
    """A made-up H200."""
    properties = SimpleNamespace(total_memory=141 * 2**30, multi_processor_count=132)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda device: properties)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)


def test_a_resumed_run_keeps_the_chunks_of_its_loss(h200):
    chosen = LossChunks(num_bytes=2**30, num_multiprocessors=132)
    assert choose_loss_chunks(GPTConfig(), None, CUDA) == chosen
    assert choose_loss_chunks(GPTConfig(), None, CPU) is None
    small_gpu = LossChunks(num_bytes=2**28, num_multiprocessors=46)
    began_there = saved({}, {}, loss_chunks=dataclasses.asdict(small_gpu))
    assert choose_loss_chunks(GPTConfig(), began_there, CUDA) == small_gpu
    assert choose_loss_chunks(GPTConfig(), began_there, CPU) == small_gpu  # for a later GPU
    assert choose_loss_chunks(GPTConfig(eval_only=True), began_there, CUDA) == chosen
    assert choose_loss_chunks(GPTConfig(), saved({}, {}, loss_chunks=None), CUDA) == chosen
    older = saved({}, {})  # whose chunks are equal
    equal_chunks = LossChunks(num_bytes=2**30, num_multiprocessors=None)
    assert choose_loss_chunks(GPTConfig(), older, CUDA) == equal_chunks


def test_a_checkpoint_records_the_chunks_of_the_loss(tmp_path, monkeypatch):
    bench = Bench(tmp_path)
    assert make_checkpoint_metadata(bench.read())["loss_chunks"] is None
    chunks = LossChunks(num_bytes=2**30, num_multiprocessors=132)
    monkeypatch.setattr("llm.trainers.gpt.inputs.choose_loss_chunks", lambda *_: chunks)
    recorded = make_checkpoint_metadata(bench.read())["loss_chunks"]
    assert LossChunks(**recorded) == chunks


def test_an_older_run_keeps_the_precision_of_its_routers_unless_told():
    older = saved({"mixed_precision": "bf16"}, {"torch_compile": False, "tf32": False})
    assert choose_device_options(GPTConfig(), older, CPU)["router_dtype"] == "model"
    assert choose_device_options(GPTConfig(**ROUTER), older, CPU)["router_dtype"] == "fp32"
    assert choose_device_options(GPTConfig(), None, CPU)["router_dtype"] == "fp32"


def test_a_default_is_not_a_change_of_a_fixed_option():
    recorded = {"mixed_precision": "fp16", "seed": 3}
    assert list_fixed_options(GPTConfig(), defaults=recorded)["mixed_precision"] == "fp16"
    given = GPTConfig(mixed_precision="no")
    assert list_fixed_options(given, defaults=recorded)["mixed_precision"] == "no"


def test_tf32_is_set_on_a_gpu_and_only_there(monkeypatch):
    asked = []
    monkeypatch.setattr("torch.set_float32_matmul_precision", asked.append)
    set_float32_precision(PrecisionOptions(tf32=True), CPU)
    set_float32_precision(PrecisionOptions(tf32=True), CUDA)
    set_float32_precision(PrecisionOptions(tf32=False), CUDA)
    assert asked == ["high", "highest"]


def test_the_log_says_which_of_them_are_on(tmp_path):
    fast = Bench(tmp_path).train_well("fast", max_train_steps=1, tf32=True)
    assert "cpu, mixed precision no, TF32, seed 1" in fast.output
    config = (fast.folder / "config.toml").read_text()
    assert 'mixed_precision = "no"' in config
    assert "torch_compile = false" in config


@pytest.mark.extended
def test_the_log_names_routers_in_float32_in_mixed_precision_only(tmp_path):
    bench = Bench(tmp_path, family="qwen3_moe")
    options = {"mixed_precision": "bf16", "max_train_steps": 1}
    said = "mixed precision bf16, routers in float32, seed 1"
    assert said in bench.train_well("fp32", **options).output
    assert (
        "routers in float32"
        not in bench.train_well("as_model", **options, router_dtype="model").output
    )
    assert "routers in float32" not in bench.train_well("no", max_train_steps=1).output
