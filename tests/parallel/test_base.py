"""The contract of a strategy, against a plain Hugging Face loop."""

import contextlib
import sys
import types
from datetime import timedelta

import pytest
import torch
import torch.nn.functional as F
from accelerate.utils import imports
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from llm.errors import ParallelError
from llm.models.loss import LanguageModelLoss
from llm.models.patches.experts import autocast_grouped_products
from llm.optim.run_optimizer import OptimizerFactory
from llm.parallel.accelerator import (
    check_gpus_visible,
    check_precision,
    ddp_settings,
    form_default_group,
    make_accelerator,
)
from llm.parallel.base import AcceleratedStrategy
from llm.parallel.options import PrecisionOptions
from tests.support.layouts import make_data_parallel, share, step_data
from tests.support.models import still_model, tiny_config, tiny_model
from tests.support.ranks import run_ranks, values

STEPS = 5


def train(accumulation: int, mixed_precision: str = "no", poison: int | None = None):
    """Losses, gradient norms, skips and final weights of a few steps."""
    strategy = make_data_parallel(mixed_precision)
    records = []
    for step in range(STEPS):
        micro_batches, num_tokens = share(step, strategy, accumulation)
        loss_sum = strategy.forward_backward(micro_batches, num_tokens=num_tokens)
        if step == poison:
            strategy.parameters[0].grad[0, 0] = float("inf")
        norm, skipped = strategy.optimizer_step(1.0)
        loss = strategy.reduce_sum(loss_sum) / num_tokens
        records.append((float(loss), float(norm), float(skipped)))
    weights = torch.cat([p.detach().flatten() for p in strategy.model.parameters()])
    return records, weights.tolist()


def reference():
    """The same steps by the book: mean cross-entropy of a whole batch, clip, AdamW."""
    model = still_model()
    decayed = [p for p in model.parameters() if p.ndim >= 2]
    others = [p for p in model.parameters() if p.ndim < 2]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}],
        lr=1e-2,
        betas=(0.9, 0.95),
        eps=1e-4,
    )
    records = []
    for step in range(STEPS):
        input_ids, labels = step_data(step)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(input_ids).logits.flatten(0, 1), labels.flatten())
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        records.append((loss.item(), norm.item(), 0.0))
    return records, torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()


@pytest.mark.parametrize(
    ("ranks", "accumulation"),
    [
        (1, 1),
        (1, 4),
        pytest.param(2, 1, marks=pytest.mark.extended),
        (2, 2),
        pytest.param(4, 2, marks=pytest.mark.layouts),
    ],
)
def test_steps_equal_a_plain_loop_for_any_ranks_and_accumulation(ranks, accumulation):
    expected_records, expected_weights = reference()
    for records, weights in values(run_ranks(train, ranks, accumulation)):
        torch.testing.assert_close(
            torch.tensor(records), torch.tensor(expected_records), rtol=1e-5, atol=1e-7
        )
        torch.testing.assert_close(
            torch.tensor(weights), torch.tensor(expected_weights), rtol=1e-3, atol=1e-4
        )


def test_bf16_and_fp16_train_close_to_float32():
    (exact, _), *_ = values(run_ranks(train, 2, 2, "no"))
    for precision, tolerance in (("bf16", 0.05), ("fp16", 0.01)):
        (records, _), *_ = values(run_ranks(train, 2, 2, precision))
        assert [record[0] for record in records] == pytest.approx(
            [record[0] for record in exact], rel=tolerance
        )
        assert records != exact, f"{precision} computed in float32"


class WeightCasts(TorchDispatchMode):
    """Counts the casts of a model's weights to half precision."""

    def __init__(self, model):
        super().__init__()
        self.weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
        self.number = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._to_copy.default and args[0].is_floating_point():
            self.number += args[0].untyped_storage().data_ptr() in self.weights
        return func(*args, **(kwargs or {}))


def casts_of_steps(family: str, precision: str, cases: list[tuple[int, bool]]):
    autocast_grouped_products()
    return [casts_of_a_step(family, precision, *case) for case in cases]


def casts_of_a_step(family: str, precision: str, accumulation: int, once: bool):
    """Number of casts in a second step, and the gradients of both."""
    strategy = make_data_parallel(precision, family=family)
    if not once:
        strategy._weight_casts = lambda num_micro_batches: contextlib.nullcontext()
    gradients = []
    for step in range(2):
        micro_batches, num_tokens = share(step, strategy, accumulation)
        with WeightCasts(strategy.model) as casts:
            strategy.forward_backward(micro_batches, num_tokens=num_tokens)
        gradients += [p.grad.flatten().tolist() for p in strategy.parameters]
        strategy.optimizer_step(1.0)
    return casts.number, gradients


@pytest.mark.parametrize(
    ("family", "ranks", "precision"),
    [
        ("gpt2", 2, "bf16"),
        pytest.param("gpt2", 1, "fp16", marks=pytest.mark.extended),
        pytest.param("qwen3_moe", 1, "bf16", marks=pytest.mark.extended),
        pytest.param("gpt_oss", 1, "bf16", marks=pytest.mark.extended),
    ],
)
def test_weights_are_cast_once_a_step_with_the_same_gradients(family, ranks, precision):
    cases = [(1, True), (4, True), (4, False)]
    (of_one, _), (of_four, shared), (repeated, apart) = values(
        run_ranks(casts_of_steps, ranks, family, precision, cases)
    )[0]
    assert of_one == of_four > 0
    assert repeated == 4 * of_one
    assert shared == apart


def train_with_a_poisoned_rank(mixed_precision: str):
    strategy = make_data_parallel(mixed_precision)
    poisoned = False
    if strategy.rank == 1:
        strategy.parameters[0].register_hook(
            lambda gradient: gradient * float("nan") if poisoned else gradient
        )
    skips = []
    for step in range(4):
        poisoned = step == 2
        micro_batches, num_tokens = share(step, strategy, 2)
        strategy.forward_backward(micro_batches, num_tokens=num_tokens)
        skips.append(float(strategy.optimizer_step(1.0)[1]))
    weights = torch.cat([p.detach().flatten() for p in strategy.model.parameters()])
    return skips, weights.tolist()


@pytest.mark.parametrize("precision", [pytest.param("no", marks=pytest.mark.extended), "fp16"])
def test_a_non_finite_gradient_on_one_rank_skips_the_step_on_all(precision):
    (skips, weights), other = values(run_ranks(train_with_a_poisoned_rank, 2, precision))
    assert skips == [0, 0, 1, 0]
    assert other == (skips, weights)
    assert all(torch.isfinite(torch.tensor(weights)))


def moments(strategy: AcceleratedStrategy) -> list[torch.Tensor]:
    states = strategy.optimizer.state.values()
    return [tensor for state in states for tensor in state.values()]


def skipped_state():
    strategy = make_data_parallel()
    micro_batches, num_tokens = share(0, strategy, 1)
    strategy.forward_backward(micro_batches, num_tokens=num_tokens)
    strategy.optimizer_step(1.0)
    before = [tensor.clone() for tensor in moments(strategy)]
    weights = [p.detach().clone() for p in strategy.parameters]
    micro_batches, num_tokens = share(1, strategy, 1)
    strategy.forward_backward(micro_batches, num_tokens=num_tokens)
    strategy.parameters[0].grad[0, 0] = float("nan")
    strategy.optimizer_step(1.0)
    same_moments = all(map(torch.equal, before, moments(strategy)))
    return same_moments and all(map(torch.equal, weights, strategy.parameters))


def test_a_skipped_step_changes_no_weight_moment_or_step_count():
    assert values(run_ranks(skipped_state, 1)) == [True]


def fp16_scale():
    strategy = make_data_parallel("fp16")
    micro_batches, num_tokens = share(0, strategy, 1)
    before = float(strategy.loss_scale())
    strategy.forward_backward(micro_batches, num_tokens=num_tokens)
    norm, _ = strategy.optimizer_step(0.0)
    kept = float(strategy.loss_scale())
    for parameter in strategy.parameters[:1]:
        parameter.register_hook(lambda gradient: gradient * float("inf"))
    strategy.forward_backward(micro_batches, num_tokens=num_tokens)
    _, skipped = strategy.optimizer_step(0.0)
    return before, kept, float(norm), float(skipped), float(strategy.loss_scale())


def test_fp16_scales_the_loss_on_a_cpu_too_and_backs_off_after_an_overflow():
    ((before, kept, norm, skipped, after),) = values(run_ranks(fp16_scale, 1))
    assert before == kept == 65536.0
    assert norm == pytest.approx(reference()[0][0][1], rel=0.02)
    assert skipped == 1.0
    assert after == 32768.0


def votes():
    strategy = make_data_parallel()
    asked = [strategy.reduce_flags([strategy.rank == 1 and turn == 1, False]) for turn in range(4)]
    return asked


def test_all_ranks_receive_a_flag_at_the_next_call():
    first, second = values(run_ranks(votes, 2))
    assert first == second == [[False, False], [False, False], [True, False], [False, False]]


@pytest.mark.parametrize(("device", "size"), [("cpu", 25), ("cuda", 100), ("xpu", 100)])
def test_an_all_reduce_is_larger_on_accelerators(device, size):
    assert ddp_settings(torch.device(device), PrecisionOptions()).bucket_cap_mb == size


class AllReduces(TorchDispatchMode):
    """Lists the types of the tensors that are all-reduced inside the context."""

    def __init__(self):
        super().__init__()
        self.dtypes = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._schema.name == "c10d::allreduce_":
            self.dtypes += [tensor.dtype for tensor in args[0]]
        return func(*args, **(kwargs or {}))


def all_reduced_gradients(dtype: str):
    """Types of the messages of a step of two micro-batches, and the gradients of all ranks."""
    strategy = make_data_parallel(all_reduce_dtype=dtype)
    micro_batches, num_tokens = share(0, strategy, 2)
    with AllReduces() as messages:
        strategy.forward_backward(micro_batches, num_tokens=num_tokens)
    return messages.dtypes, torch.cat([p.grad.flatten() for p in strategy.parameters])


def test_gradients_travel_in_bf16_if_asked_to():
    (dtypes, exact), _ = values(run_ranks(all_reduced_gradients, 2, "fp32"))
    assert dtypes == [torch.float32]
    (dtypes, rounded), (_, of_other) = values(run_ranks(all_reduced_gradients, 2, "bf16"))
    assert dtypes == [torch.bfloat16]
    assert torch.equal(rounded, of_other)
    assert torch.equal(rounded, rounded.bfloat16().float())
    # Both terms and their sum are rounded, each by at most 2**-8 of it.
    assert (rounded - exact).norm() < 2**-8 * exact.norm()
    assert not torch.equal(rounded, exact)


def test_one_rank_sends_nothing_and_does_not_round():
    (_, exact), (_, same) = (
        values(run_ranks(all_reduced_gradients, 1, dtype))[0] for dtype in ("fp32", "bf16")
    )
    assert torch.equal(same, exact)


def test_fp8_on_a_cpu_is_refused_by_name():
    with pytest.raises(ParallelError, match=r"--mixed_precision fp8 .* use bf16 or no"):
        check_precision(PrecisionOptions(mixed_precision="fp8"), torch.device("cpu"))


@pytest.mark.parametrize(
    ("precision", "instructions", "faster"),
    [
        ("fp16", [torch.bfloat16], "bf16"),
        ("fp16", [], "no"),
        ("bf16", [], "no"),
        ("fp16", [torch.bfloat16, torch.float16], None),
        ("bf16", [torch.bfloat16], None),
    ],
)
def test_a_slow_precision_of_a_cpu_is_warned_of(
    precision, instructions, faster, monkeypatch, caplog
):
    monkeypatch.setattr(
        "llm.parallel.accelerator.has_half_products",
        lambda device, dtype=torch.bfloat16: dtype in instructions,
    )

    check_precision(PrecisionOptions(mixed_precision=precision), torch.device("cpu"))

    warnings = {f"--mixed_precision {precision} takes many times as long as {faster}"}
    assert {message.split(" on this CPU")[0] for message in caplog.messages} == (
        warnings if faster else set()
    )


class Float8Linear(nn.Linear):
    """A stand-in for torchao's."""


def convert_to_float8_training(model, *, module_filter_fn, config):
    assert config == {"pad_inner_dim": True, "enable_fsdp_float8_all_gather": False}
    for name, module in model.named_modules():
        if type(module) is nn.Linear and module_filter_fn(module, name):
            module.__class__ = Float8Linear


def fp8_layers(family: str, changes: dict[str, int] | None = None) -> list[str]:
    torchao = types.ModuleType("torchao.float8")
    torchao.Float8LinearConfig = dict
    torchao.convert_to_float8_training = convert_to_float8_training
    sys.modules["torchao.float8"] = torchao
    imports.is_torchao_available = lambda: True
    model = tiny_model(tiny_config(family, **(changes or {})))
    strategy = AcceleratedStrategy(make_accelerator(PrecisionOptions(), device=torch.device("cpu")))
    strategy.accelerator.state._mixed_precision = "fp8"  # refused on a CPU
    strategy.prepare(
        LanguageModelLoss(model),
        OptimizerFactory(lambda model: torch.optim.AdamW(model.parameters())).make,
    )
    return [name for name, module in model.named_modules() if type(module) is Float8Linear]


def test_fp8_converts_all_linear_layers_but_the_first_and_the_last():
    [layers] = values(run_ranks(fp8_layers, 1, "llama"))
    attention = ["self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"]
    mlp = ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
    assert layers == [
        *(f"model.layers.0.{name}" for name in [*attention, *mlp]),
        *(f"model.layers.1.{name}" for name in ["self_attn.q_proj", *attention, *mlp]),
    ]


def test_fp8_does_not_convert_routers_in_float32():
    [layers] = values(run_ranks(fp8_layers, 1, "afmoe", {"num_experts": 16}))
    assert "model.layers.0.mlp.shared_experts.down_proj" in layers
    assert not any("router" in name for name in layers)


def test_fp8_is_refused_for_a_model_in_which_it_converts_no_layer():
    [outcome] = run_ranks(fp8_layers, 1, "gpt2")
    assert "--mixed_precision fp8 changes linear layers" in outcome.error
    assert "use bf16" in outcome.error


@pytest.mark.parametrize(
    ("cuda", "remedy"),
    [
        (None, r"built without CUDA: install"),
        ("12.8", r"check that the driver supports CUDA 12\.8"),
    ],
)
def test_a_run_on_gpus_that_torch_does_not_see_is_refused(cuda, remedy, tmp_path, monkeypatch):
    driver = tmp_path / "version"
    driver.touch()
    monkeypatch.setattr("llm.parallel.accelerator.NVIDIA_DRIVER", driver)
    monkeypatch.setattr("torch.version.cuda", cuda)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    with pytest.raises(ParallelError, match=rf"{remedy}.*CUDA_VISIBLE_DEVICES to an empty string"):
        check_gpus_visible(torch.device("cpu"))

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    check_gpus_visible(torch.device("cpu"))

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    check_gpus_visible(torch.device("cpu"))


def test_bf16_that_a_gpu_only_emulates_is_refused(monkeypatch):
    monkeypatch.setattr(
        "torch.cuda.is_bf16_supported", lambda including_emulation=True: including_emulation
    )
    with pytest.raises(ParallelError, match=r"--mixed_precision bf16 .* use fp16 or no"):
        check_precision(PrecisionOptions(mixed_precision="bf16"), torch.device("cuda"))


@pytest.mark.parametrize(
    ("device", "backends"),
    [("cpu", "gloo"), ("cuda:1", "cpu:gloo,cuda:nccl"), ("xpu:1", "cpu:gloo,xpu:xccl")],
)
def test_the_default_group_knows_its_device_and_time_out(device, backends, monkeypatch):
    for name, value in {"WORLD_SIZE": "2", "RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    formed = []
    monkeypatch.setattr(
        "torch.distributed.init_process_group",
        lambda *args, **kwargs: formed.append((args, kwargs)),
    )
    monkeypatch.setattr("llm.parallel.accelerator.unbind_unsplittable_group", lambda device: None)

    form_default_group(torch.device(device), timeout=timedelta(minutes=31))

    [(args, given)] = formed
    assert args == (backends,)
    assert given.pop("timeout") == timedelta(minutes=31)
    assert given == ({} if device == "cpu" else {"device_id": torch.device(device)})
