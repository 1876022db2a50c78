"""Ranks that read only their shards of pretrained weights, against a model that is loaded whole."""

import functools
from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from llm.models.loss import LanguageModelLoss
from llm.models.weight_files import find_weight_files
from llm.optim.run_optimizer import OptimizerFactory
from llm.parallel.fsdp import ShardedStrategy
from llm.parallel.options import ParallelOptions
from llm.parallel.sharded_init import fill_model
from tests.support.layouts import MODEL_OPTIONS, cpu_accelerator, dims_of, make_optimizer, make_sgd
from tests.support.models import large_config, model_options, tiny_config, tiny_model
from tests.support.processes import memory
from tests.support.ranks import run_ranks, values
from tests.support.training import NO_DROPOUT, Bench

CPU, META = torch.device("cpu"), torch.device("meta")


def save_weights(folder: Path, config, *, size: str = "20KB", dtype: torch.dtype) -> str:
    """A folder of pretrained weights, in several files."""
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(config).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    model.save_pretrained(folder, max_shard_size=size)
    return str(folder)


def start(accelerator, config, folder: str, sizes: dict[str, int], optimizer, **options):
    model = tiny_model(config, weights_from=folder, device=META, **options)
    files = find_weight_files(model, folder)
    assert files is not None
    strategy = ShardedStrategy(
        ParallelOptions(),
        accelerator,
        dims_of(**sizes),
        init_weights=functools.partial(
            fill_model, model_options(options), seed=1, device=CPU, files=files
        ),
    )
    strategy.prepare(LanguageModelLoss(model), OptimizerFactory(optimizer).make)
    return strategy


def differences(cases, sizes: dict[str, int]) -> list[str]:
    """What differs from the weights that every rank reads whole."""
    accelerator = cpu_accelerator()
    found = []
    for family, folder, options in cases:
        config = tiny_config(family)
        expected = tiny_model(config, weights_from=folder, **options)
        strategy = start(accelerator, config, folder, sizes, make_optimizer, **options)
        whole = dict([*expected.named_parameters(), *expected.named_buffers()])
        for name, tensor in strategy.model.state_dict().items():
            tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            reference = whole.get(name, expected.state_dict()[name])
            if tensor.dtype != torch.float32 or not torch.equal(tensor, reference):
                found.append(f"{family}: {name}")
        if strategy.model.generation_config.to_dict() != expected.generation_config.to_dict():
            found.append(f"{family}: generation")
    return found


@pytest.mark.parametrize(
    ("ranks", "sizes"),
    [
        (2, {"shard": 2}),
        pytest.param(4, {"shard": 4}, marks=pytest.mark.layouts),
        pytest.param(4, {"shard": 2, "tensor": 2}, marks=pytest.mark.extended),
    ],
)
def test_sharded_ranks_read_the_weights_of_a_whole_load(tmp_path, ranks, sizes):
    cases = []
    for family, dtype, options in (
        ("gpt2", torch.float32, {}),
        ("gpt2", torch.float32, {**MODEL_OPTIONS, "tied_gradients": False}),
        ("llama", torch.bfloat16, {}),
        ("llama", torch.bfloat16, {"pad_vocab_to_multiple_of": 128}),
    ):
        folder = tmp_path / f"{family}{len(cases)}"
        save_weights(folder, tiny_config(family), dtype=dtype)
        assert len(list(folder.glob("*.safetensors"))) > 2
        cases.append((family, str(folder), options))

    assert values(run_ranks(differences, ranks, cases, sizes)) == [[]] * ranks


@pytest.mark.parametrize("reason", ["bin", "missing", "converted", "vocabulary", "shape"])
def test_weights_that_do_not_fit_one_by_one_are_left_to_transformers(tmp_path, reason):
    config = tiny_config("mixtral" if reason == "converted" else "gpt2")
    model = AutoModelForCausalLM.from_config(config)
    rows = config.vocab_size
    if reason == "bin":
        torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    else:
        state = model.state_dict()
        if reason == "missing":
            del state["transformer.ln_f.weight"]
        model.save_pretrained(tmp_path, state_dict=state)
    if reason == "vocabulary":
        rows += 8
    if reason == "shape":
        config = tiny_config("gpt2", n_positions=2 * config.n_positions)

    built = tiny_model(config, weights_from=str(tmp_path), device=META, vocab_size=rows)

    assert find_weight_files(built, str(tmp_path)) is None


def peak_of_start(folders: list[str]) -> tuple[int, int]:
    """Bytes of the whole model, and the most that this process took on to read its shards."""
    accelerator = cpu_accelerator()
    sizes = {"shard": 4}
    start(accelerator, tiny_config("llama"), folders[0], sizes, make_sgd)  # imports
    Path("/proc/self/clear_refs").write_text("5")  # let the peak begin anew
    before = memory("VmRSS")
    strategy = start(accelerator, large_config(), folders[1], sizes, make_sgd)
    whole = sum(4 * parameter.numel() for parameter in strategy.model.parameters())
    return whole, memory("VmHWM") - before


@pytest.mark.layouts
def test_a_rank_takes_the_memory_of_its_shards_and_one_file(tmp_path):
    folders = [
        save_weights(tmp_path / "tiny", tiny_config("llama"), dtype=torch.float32),
        save_weights(tmp_path / "large", large_config(), size="20MB", dtype=torch.float32),
    ]
    for whole, peak in values(run_ranks(peak_of_start, 4, folders)):
        assert whole > 200e6
        assert whole / 4 < peak < whole / 4 + 20e6 + 10e6


@pytest.mark.parametrize(
    "sizes",
    [
        {"data_parallel_shard_size": 2},
        pytest.param({"pipeline_parallel_size": 2}, marks=pytest.mark.layouts),
    ],
)
def test_a_sharded_run_from_weights_has_the_losses_of_an_unsharded_one(tmp_path, sizes):
    bench = Bench(tmp_path, **NO_DROPOUT)
    save_weights(bench.model, tiny_config("gpt2", **NO_DROPOUT), dtype=torch.float32)
    whole = bench.train_well("whole", max_train_steps=2, per_device_train_batch_size=8)
    divided = bench.train_well(
        "divided",
        ranks=2,
        max_train_steps=2,
        per_device_train_batch_size=4,
        global_batch_size=8,
        **sizes,
    )

    assert divided.losses == pytest.approx(whole.losses, rel=1e-5)
