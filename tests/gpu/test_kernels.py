"""The kernels that the device runs, against float64 or the plain operations that they replace."""

from functools import partial

import pytest
import torch
from torch.nn.functional import cross_entropy

from llm.checkpoint.snapshot import copy_to_host
from llm.models.attention import run_model, use_document_attention
from llm.models.compilation import compile_blocks
from llm.models.cross_entropy import chunked_cross_entropy
from llm.models.loss import LanguageModelLoss
from llm.trainers.gpt.extensions import GPTConfig
from llm.trainers.gpt.seams import choose_factory, make_extensions
from tests.gpu.device import CPU, DEVICE, gpu, only_on_a_gpu
from tests.support.models import VOCAB_SIZE, tiny_config, tiny_model
from tests.support.training import NO_DROPOUT

pytestmark = gpu


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    """The norm of the difference, relative to the norm of the other tensor."""
    one, other = one.cpu().double(), other.cpu().double()
    return float((one - other).norm() / other.norm())


def tokens(samples: int, length: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(VOCAB_SIZE, (samples, length), generator=generator).to(DEVICE)


@pytest.mark.parametrize(
    "softmax",
    [None, *(pytest.param(name, marks=only_on_a_gpu) for name in ("kernel", "few programs"))],
)
@pytest.mark.parametrize(("dtype", "bound"), [(torch.bfloat16, 1e-2), (torch.float16, 3e-3)])
def test_the_chunked_loss_and_its_gradients_are_those_in_float64(softmax, dtype, bound):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(700, 96, generator=generator, dtype=torch.float64)
    weight = torch.randn(1000, 96, generator=generator, dtype=torch.float64) / 10
    labels = torch.randint(1000, (700,), generator=generator)
    labels[::7] = -100
    exact = [tensor.clone().requires_grad_() for tensor in (hidden, weight)]
    expected = cross_entropy(exact[0] @ exact[1].T, labels, reduction="sum")
    expected.backward()

    kernel = None
    if softmax is not None:
        from llm.models.softmax_kernel import softmax_in_place

        kernel = partial(softmax_in_place, num_programs=9 if softmax == "few programs" else None)

    ours = [tensor.to(DEVICE, torch.float32).requires_grad_() for tensor in (hidden, weight)]
    with torch.autocast(DEVICE.type, dtype):
        loss, _ = chunked_cross_entropy(
            *ours,
            None,
            labels.to(DEVICE),
            vocab_size=1000,
            chunk_rows=256,
            column_multiple=128,
            softmax=kernel,
        )
    loss.backward()

    assert loss.item() == pytest.approx(expected.item(), rel=1e-3)
    for tensor, reference in zip(ours, exact, strict=True):
        assert tensor.grad.dtype == torch.float32
        assert distance(tensor.grad, reference.grad) < bound


@only_on_a_gpu
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_fused_backward_passes_have_the_gradients_of_plain_blocks(family):
    ids = tokens(4, 65)
    dropout = NO_DROPOUT if family == "gpt2" else {}
    gradients = []
    for fused in (False, True):
        model = tiny_model(tiny_config(family, **dropout), device=DEVICE, fused_gelu=True)
        loss = LanguageModelLoss(model)
        if fused:
            compile_blocks(model, fuse_backward=True)
        with (
            torch._dynamo.config.patch(suppress_errors=False),
            torch.autocast(DEVICE.type, torch.bfloat16),
        ):
            objective, _ = loss(ids[:, :-1], ids[:, 1:])
        objective.backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    plain, found = gradients
    assert {name for name in plain if distance(found[name], plain[name]) > 2e-2} == set()


def test_the_one_gradient_of_a_tied_embedding_is_the_sum_of_both():
    ids = tokens(4, 17)
    gradients = []
    for tied in (False, True):
        model = tiny_model(tiny_config("gpt2"), device=DEVICE, tied_gradients=tied).eval()
        objective, _ = LanguageModelLoss(model)(ids[:, :-1], ids[:, 1:])
        objective.backward()
        gradients.append(model.get_input_embeddings().weight.grad)
    assert distance(gradients[1], gradients[0]) < 1e-5


@pytest.mark.parametrize("family", ["gpt2", "llama", "mistral"])
@pytest.mark.parametrize("flex", [False, pytest.param(True, marks=only_on_a_gpu)])
def test_a_shared_mask_keeps_documents_apart_as_the_mask_of_each_layer(family, flex):
    ids = tokens(2, 64)
    documents = (torch.arange(64) // 25).expand(2, -1)

    def gradient(device: torch.device, documents: torch.Tensor | None) -> torch.Tensor:
        dropout = NO_DROPOUT if family == "gpt2" else {}
        # Drawn on the CPU: a GPU draws other weights.
        model = tiny_model(tiny_config(family, **dropout)).to(device)
        if device is DEVICE:
            use_document_attention(model, flex=flex)
            kind = "blocks" if flex else "dense"
            assert model.config._attn_implementation == f"document_attention_{kind}"
        documents = None if documents is None else documents.to(device)
        logits = run_model(model, ids.to(device), None, documents).logits
        # Powers, since the sum of logits alone would hardly depend on attention.
        logits.logsumexp(-1).pow(2).sum().backward()
        weights = [p for name, p in model.named_parameters() if "attn" in name and p.ndim == 2]
        return torch.cat([weight.grad.flatten() for weight in weights]).cpu()

    expected = gradient(CPU, documents)
    assert distance(gradient(CPU, None), expected) > 0.1
    assert distance(gradient(DEVICE, documents), expected) < 1e-2


def test_copies_to_the_host_are_whole_and_pinned():
    tensors = {
        "large": torch.randn(1000, 999, device=DEVICE),
        "bf16": torch.randn(7, device=DEVICE, dtype=torch.bfloat16),
        "transposed": torch.randn(64, 128, device=DEVICE).t(),
    }
    buffers: dict[str, torch.Tensor] = {}
    for _ in range(2):  # the second save reuses the buffers of the first
        expected = {name: tensor.clone().cpu() for name, tensor in tensors.items()}
        copies = copy_to_host(tensors, buffers, blocking_paths={"bf16"})
        tensors["bf16"].zero_()  # as a forward pass may
        copies.wait_on_device()
        for tensor in tensors.values():
            tensor.zero_()  # as training does; the host has not waited
        copies.wait_on_host()
        for name, copy in copies.tensors.items():
            assert torch.equal(copy, expected[name])
            assert copy.is_pinned() == (DEVICE.type == "cuda")
        for tensor in tensors.values():
            tensor.normal_()


@pytest.mark.parametrize("name", ["adamw", "muon", "soap", "sgd"])
def test_an_optimizer_skips_its_step_where_a_gradient_overflowed(name):
    model = tiny_model(tiny_config("gpt2"), device=DEVICE)
    options = GPTConfig(optimizer=name, learning_rate=1e-2)
    optimizer = (
        choose_factory(options, make_extensions(options), seed=0).make(model, None).optimizer
    )
    for found_inf in (0.0, 0.0, 1.0):  # SOAP makes its first bases in the first step
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        before = [parameter.detach().clone() for parameter in model.parameters()]
        optimizer.found_inf = torch.full((), found_inf, device=DEVICE)
        optimizer.step()
    assert all(map(torch.equal, before, model.parameters()))
    optimizer.found_inf.zero_()
    optimizer.step()
    assert not any(map(torch.equal, before, model.parameters()))


@only_on_a_gpu
@pytest.mark.parametrize("name", ["adamw", "muon", "sgd"])
def test_the_host_waits_for_nothing_in_a_step(name):
    model = tiny_model(tiny_config("gpt2"), device=DEVICE)
    options = GPTConfig(optimizer=name, learning_rate=1e-2)
    optimizer = (
        choose_factory(options, make_extensions(options), seed=0).make(model, None).optimizer
    )
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.found_inf = torch.zeros((), device=DEVICE)
    optimizer.step()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    torch.cuda.set_sync_debug_mode("error")  # a wait for the device raises
    try:
        optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert not any(map(torch.equal, before, model.parameters()))
