"""The output head in float8, in PyTorch's float8 products of a CPU."""

import pytest
import torch
from torch import Tensor
from transformers import CohereConfig

from llm.errors import ConfigError, ParallelError
from llm.models.float8_head import Float8Weight
from llm.models.loss import LanguageModelLoss, make_loss
from llm.models.options import ModelOptions
from llm.parallel.accelerator import check_precision
from llm.parallel.options import PrecisionOptions
from llm.trainers.gpt.config import check_config
from llm.trainers.gpt.extensions import GPTConfig
from tests.support.models import VOCAB_SIZE, tiny_config, tiny_model
from tests.support.training import NO_DROPOUT

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
E4M3_MAX = 448.0
NARROW = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
NARROW |= {"num_attention_heads": 2, "num_key_value_heads": 2}


def normal(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(torch.bfloat16)


def rounded_to_e4m3(tensor: Tensor) -> Tensor:
    scale = tensor.float().abs().max() / E4M3_MAX
    return (tensor.float() / scale).to(torch.float8_e4m3fn).float() * scale


def distance(found: Tensor, expected: Tensor) -> float:
    """The norm of the difference, relative to the norm of what is expected."""
    return float((found.float() - expected).norm() / expected.norm())


def test_logits_are_the_product_of_rounded_factors():
    hidden, weight = normal(48, 32, seed=0), normal(128, 32, seed=1)
    logits = Float8Weight(weight).compute_logits(hidden)
    assert logits.dtype == torch.bfloat16
    assert distance(logits, rounded_to_e4m3(hidden) @ rounded_to_e4m3(weight).T) < 3e-3
    assert distance(logits, hidden.float() @ weight.float().T) < 0.06


@pytest.mark.parametrize("size", [1.0, 1e-6])  # probabilities of unlikely tokens are small
def test_the_gradient_of_hidden_states_is_the_product_of_rounded_factors(size):
    gradient, weight = (
        size * (torch.rand(48, 128) * 2 - 1).to(torch.bfloat16),
        normal(128, 32, seed=1),
    )
    found = Float8Weight(weight).compute_hidden_gradient(gradient)
    rounded = (gradient.float() * 2**15).to(torch.float8_e5m2).float() / 2**15
    assert found.dtype == torch.bfloat16
    assert distance(found, rounded @ rounded_to_e4m3(weight)) < 5e-3
    assert distance(found, gradient.float() @ weight.float()) < 0.15


def test_zeros_stay_zeros():
    weight = Float8Weight(torch.zeros(128, 32, dtype=torch.bfloat16))
    assert weight.compute_logits(torch.zeros(16, 32, dtype=torch.bfloat16)).count_nonzero() == 0
    assert (
        weight.compute_hidden_gradient(torch.ones(16, 128, dtype=torch.bfloat16)).count_nonzero()
        == 0
    )


def loss_and_gradients(*, is_float8: bool, training: bool = True) -> tuple[Tensor, Tensor]:
    model = tiny_model(tiny_config("gpt2", **NO_DROPOUT)).train(training)
    loss = LanguageModelLoss(model, is_aligned=True, is_float8=is_float8).train(training)
    ids = torch.randint(VOCAB_SIZE, (4, 33), generator=torch.Generator().manual_seed(0))
    with torch.autocast("cpu", torch.bfloat16):
        objective, _ = loss(ids[:, :-1], ids[:, 1:])
    objective.backward()
    return objective.detach(), torch.cat([p.grad.flatten() for p in model.parameters()])


def test_a_model_trains_near_bf16_and_evaluates_in_bf16():
    exact, float8 = (loss_and_gradients(is_float8=value) for value in (False, True))
    assert float8[0] == pytest.approx(float(exact[0]), rel=2e-3)
    assert 0 < distance(float8[1], exact[1]) < 0.1
    evaluations = [loss_and_gradients(is_float8=value, training=False) for value in (False, True)]
    assert torch.equal(evaluations[0][0], evaluations[1][0])


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (CohereConfig(**NARROW, logit_scale=0.5), "changes its logits after the output head"),
        (tiny_config("gptj"), "has an output head with a bias"),
        (tiny_config("gpt2", n_embd=24, n_head=2), "has a width of 24, not a multiple of 16"),
    ],
)
def test_a_head_that_cannot_multiply_in_float8_is_refused(config, words):
    model = tiny_model(config)
    options = {"device": CPU, "chunks": None, "is_head_sharded": False}
    with pytest.raises(
        ConfigError, match=f"--fp8_head does not go with {config.model_type}, .*{words}"
    ):
        make_loss(ModelOptions(), model, is_float8=True, **options)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tensor_parallel_size": 2}, "--fp8_head does not go with --tensor_parallel_size"),
        ({"data_parallel_shard_size": 2}, "--fp8_head does not go with --data_parallel_shard"),
        ({"kfac": True}, "--fp8_head does not go with --kfac"),
        ({"data_parallel": "gossip"}, "--fp8_head does not go with --data_parallel gossip"),
        ({"z_loss": 0.01}, "--fp8_head does not go with --z_loss above 0.001"),
    ],
)
def test_what_has_not_been_tried_with_it_is_refused(options, words):
    config = GPTConfig(
        model_type="gpt2", tokenizer_name="x", train_file=("x",), fp8_head=True, **options
    )
    with pytest.raises(ConfigError, match=words):
        check_config(config)


@pytest.mark.parametrize(
    ("precision", "capability", "hip", "words"),
    [
        ("bf16", (9, 0), None, None),
        ("bf16", (8, 0), None, "needs an NVIDIA GPU of compute capability 8.9"),
        ("bf16", (9, 4), "7.0", "needs an NVIDIA GPU"),
        ("fp8", (9, 0), "7.0", "fp8 needs an NVIDIA GPU"),
        ("fp16", (9, 0), None, "goes with --mixed_precision bf16 or fp8, not fp16"),
    ],
)
def test_a_gpu_without_float8_is_refused(monkeypatch, precision, capability, hip, words):
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: capability)
    monkeypatch.setattr("torch.cuda.is_bf16_supported", lambda including_emulation=True: True)
    monkeypatch.setattr("torch.version.hip", hip)
    monkeypatch.setattr("llm.parallel.accelerator.has_half_products", lambda *_: True)
    options = PrecisionOptions(mixed_precision=precision, fp8_head=True)
    if words is None:
        check_precision(options, CUDA)
        return
    with pytest.raises(ParallelError, match=words):
        check_precision(options, CUDA)
    with pytest.raises(ParallelError, match="this process runs on cpu"):
        check_precision(options, CPU)
