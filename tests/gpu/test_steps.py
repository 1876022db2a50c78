"""Losses of whole runs on the device, against the same runs in float32 on the CPU."""

import json
from typing import Any

import pytest

from tests.gpu.device import CPU, DEVICE, GPUBench, gpu, only_on_a_gpu
from tests.support.recovery import check_resume
from tests.support.training import NO_DROPOUT, Run

pytestmark = gpu

OF_THE_REFERENCE = {"mixed_precision": "no", "torch_compile": False}
PRECISIONS = {
    "float32": ({"mixed_precision": "no", "tf32": False}, 1e-3),
    "TF32": ({"mixed_precision": "no", "tf32": True}, 5e-3),
    "bf16": ({"mixed_precision": "bf16"}, 1e-2),
    "fp16": ({"mixed_precision": "fp16"}, 5e-3),
}
"""Options, and the relative distance that a loss may have from the reference.

A learning rate that is a tenth higher moves a loss of the eight steps by 0.015 to 0.034."""


@pytest.fixture(scope="module")
def bench(tmp_path_factory) -> GPUBench:
    folder = tmp_path_factory.mktemp("steps")
    return GPUBench(folder, **NO_DROPOUT, n_embd=64, n_head=2, n_positions=128).write_weights()


@pytest.fixture(scope="module")
def references(bench):
    """Losses by options, which several tests share."""
    kept: dict[str, list[float]] = {}

    def losses(options: dict[str, Any]) -> list[float]:
        name = f"reference{len(kept)}"
        if str(options) not in kept:
            run = train(bench, name, device=CPU, **{**options, **OF_THE_REFERENCE})
            kept[str(options)] = run.losses
        return kept[str(options)]

    return losses


def train(bench: GPUBench, name: str, **options: Any) -> Run:
    sizes = {"block_size": 128, "per_device_train_batch_size": 8}
    shape = {**sizes, "learning_rate": 3e-3, "max_train_steps": 8}
    run = bench.train_well(name, timeout=600, **{**shape, **options})
    assert run.metrics[-1]["skipped_steps"] == 0
    return run


def check_losses(run: Run, reference: list[float], rel: float) -> None:
    assert f"world: 1 rank, {DEVICE.type}," in run.output
    assert "attention: " in run.output
    assert ("loss: chunks of about" in run.output) == (DEVICE != CPU)
    # Torch's warnings that a block runs uncompiled.
    assert "WON'T CONVERT" not in run.output
    assert "recompile_limit" not in run.output
    assert reference[-1] < 0.9 * reference[0]
    assert run.losses == pytest.approx(reference, rel=rel)


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=only_on_a_gpu)])
@pytest.mark.parametrize(
    "precision",
    [
        pytest.param("float32", marks=only_on_a_gpu),  # the reference itself
        pytest.param("TF32", marks=only_on_a_gpu),
        "bf16",
        pytest.param("fp16", marks=pytest.mark.extended),
    ],
)
def test_steps_have_the_losses_of_a_cpu_in_every_precision(bench, references, precision, compiled):
    options, rel = PRECISIONS[precision]
    run = train(bench, f"{precision}-{compiled}", torch_compile=compiled, **options)
    check_losses(run, references({}), rel)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(
            {"kfac": True, "optimizer": "soap", "nesterov": True}, marks=pytest.mark.extended
        ),
        *(
            pytest.param(options, marks=only_on_a_gpu)  # one is enough to rehearse
            for options in (
                {"optimizer": "muon"},
                {"optimizer": "soap"},
                {"optimizer": "sgd", "learning_rate": 0.1},
                {"optimizer": "accumadamw", "moment_update_steps": 4, "learning_rate": 1e-3},
                {"moment_dtype": "bf16"},
                {"kfac": True},
                {"kfac": True, "kfac_method": "eigen"},
            )
        ),
    ],
    ids=str,
)
def test_every_optimizer_has_the_losses_of_a_cpu(bench, references, request, options):
    run = train(bench, request.node.name.replace("/", "-"), mixed_precision="bf16", **options)
    # Bases of small factors turn with rounding, and `eigen` divides by their eigenvalues.
    rel = 2e-2 if options.get("kfac_method") == "eigen" else 1e-2
    check_losses(run, references(options), rel)


@pytest.mark.parametrize(
    "options",
    [
        {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 4},
        pytest.param({"activation_checkpointing": "full"}, marks=only_on_a_gpu),
        pytest.param({"activation_checkpointing": "selective"}, marks=only_on_a_gpu),
    ],
    ids=str,
)
def test_what_saves_memory_does_not_change_the_losses(bench, references, request, options):
    run = train(bench, request.node.name, mixed_precision="bf16", **options)
    check_losses(run, references({}), 1e-2)


@pytest.mark.extended
def test_runs_on_documents_have_the_losses_of_a_cpu(tmp_path):
    bench = GPUBench(tmp_path, family="llama", max_position_embeddings=128).write_weights()
    lines = bench.text.read_text(encoding="utf-8").splitlines()
    documents = tmp_path / "documents.jsonl"
    documents.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    options = {"append_eos": True, "reset_attention_mask": True, "reset_position_ids": True}
    options |= {"train_file": documents, "learning_rate": 1e-2}
    reference = train(bench, "reference", device=CPU, **options, **OF_THE_REFERENCE)
    run = train(bench, "device", mixed_precision="bf16", **options)
    if DEVICE != CPU:
        assert "kept apart by a mask of blocks of tokens" in run.output
    check_losses(run, reference.losses, 1e-2)


@pytest.mark.extended
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=only_on_a_gpu)])
def test_a_mixture_of_experts_has_the_losses_and_loads_of_a_cpu(tmp_path, compiled):
    bench = GPUBench(tmp_path, family="olmoe", max_position_embeddings=128).write_weights()
    options = {"learning_rate": 1e-2, "router_balancing": "loss"}
    reference = train(bench, "reference", device=CPU, **options, **OF_THE_REFERENCE)
    run = train(bench, "device", mixed_precision="bf16", torch_compile=compiled, **options)
    check_losses(run, reference.losses, 1e-2)
    loads, expected = (
        [record["moe_max_load"] for record in each.metrics if "moe_max_load" in record]
        for each in (run, reference)
    )
    assert loads == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, marks=only_on_a_gpu),  # which other tests check on a CPU
        pytest.param({"kfac": True}, marks=pytest.mark.extended),
        pytest.param({"mixed_precision": "fp16"}, marks=only_on_a_gpu),
    ],
    ids=str,
)
def test_a_resumed_run_has_the_bits_of_an_uninterrupted_one(tmp_path, options):
    lengths = {"max_train_steps": 6, "checkpointing_steps": 3}
    check_resume(GPUBench(tmp_path), "run", deterministic=True, **lengths, **options)
