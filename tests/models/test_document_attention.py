"""The masks that all layers share, against the mask that each layer makes its own."""

import shutil

import pytest
import torch
from torch._dynamo.utils import counters
from torch.nn.attention import flex_attention

from llm.models import attention
from llm.models.attention import use_document_attention
from llm.models.loss import LanguageModelLoss
from tests.support.models import tiny_config, tiny_model
from tests.support.operations import Reads

FAMILIES = ["gpt2", "llama", "qwen3", "mistral", "mixtral"]
"""Learned positions, shared key-value heads, norms of queries, a window of 8 tokens, experts."""


@pytest.fixture
def uncompiled(monkeypatch):
    """FlexAttention with a backward pass, which it has on a CPU only if it is not compiled."""
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *tensors: None)
    monkeypatch.setattr(flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    monkeypatch.setattr(attention, "_compile_unless_compiling", lambda function: function)


def make_model(family: str, **changes):
    no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return tiny_model(tiny_config(family, **(no_dropout if family == "gpt2" else {}), **changes))


def make_batch(seed: int = 0):
    """Two windows of 40 tokens in documents of uneven lengths, whose positions start anew."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(320, (2, 41), generator=generator)
    documents = (torch.rand(2, 40, generator=generator) < 0.15).cumsum(1)
    places = torch.arange(40).expand(2, 40)
    starts = (documents[:, None] < documents[..., None]).sum(-1)
    return tokens[:, :-1], tokens[:, 1:], places - starts, documents


def loss_and_gradient(model, dtype: torch.dtype | None = None):
    with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
        objective, (loss_sum,) = LanguageModelLoss(model)(*make_batch())
    objective.backward()
    gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    model.zero_grad()
    return loss_sum, gradient


def kernel_of(model) -> str:
    return model.config._attn_implementation


@pytest.mark.parametrize("flex", [True, False])
@pytest.mark.parametrize(
    "family",
    [
        pytest.param(family, marks=() if family == "gpt2" else pytest.mark.extended)
        for family in FAMILIES
    ],
)
def test_a_shared_mask_has_the_loss_and_gradient_of_a_mask_a_layer(family, flex, uncompiled):
    model = make_model(family)
    loss_sum, gradient = loss_and_gradient(model)
    alone = LanguageModelLoss(model)(*make_batch()[:2])[1]

    use_document_attention(model, flex=flex)

    assert kernel_of(model) == f"document_attention_{'blocks' if flex else 'dense'}"
    found, found_gradient = loss_and_gradient(model)
    torch.testing.assert_close(found, loss_sum, rtol=1e-6, atol=0)
    assert (found_gradient - gradient).norm() <= 1e-5 * gradient.norm()
    assert torch.equal(LanguageModelLoss(model)(*make_batch()[:2])[1], alone)
    assert model.training


@pytest.mark.parametrize("flex", [True, False])
def test_a_shared_mask_works_in_autocast(flex, uncompiled):
    model = make_model("qwen3")
    loss_sum, gradient = loss_and_gradient(model, torch.bfloat16)
    use_document_attention(model, flex=flex)
    found, found_gradient = loss_and_gradient(model, torch.bfloat16)
    torch.testing.assert_close(found, loss_sum, rtol=1e-3, atol=0)
    assert (found_gradient - gradient).norm() <= 0.05 * gradient.norm()


def dense_masks(model) -> int:
    """How many masks of all pairs of tokens are kept for the backward pass."""
    kept = set()

    def keep(tensor):
        if tensor.shape[-2:] == (40, 40):
            kept.add(tensor.untyped_storage().data_ptr())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        objective, _ = LanguageModelLoss(model)(*make_batch())
    assert objective.requires_grad
    return len(kept)


def test_layers_keep_one_mask_of_all_pairs_of_tokens_together():
    model = make_model("llama", num_hidden_layers=4)
    assert dense_masks(model) == 4
    use_document_attention(model, flex=False)
    assert dense_masks(model) == 1


def test_the_mask_is_made_once_a_forward_without_reading_the_device(uncompiled, monkeypatch):
    model = make_model("llama", num_hidden_layers=4)
    use_document_attention(model, flex=True)
    made = []
    original = attention.create_block_mask

    def create(*args, **kwargs):
        made.append(args)
        return original(*args, **kwargs)

    monkeypatch.setattr(attention, "create_block_mask", create)
    monkeypatch.setattr(attention, "flex_attention", lambda query, *args, **kwargs: query.clone())
    with Reads() as reads:
        LanguageModelLoss(model)(*make_batch())
    assert len(made) == 1
    assert reads.seen == []


def test_dropout_of_attention_and_failures_fall_back_to_a_dense_mask(uncompiled, monkeypatch):
    with_dropout = tiny_model(tiny_config("gpt2"))
    use_document_attention(with_dropout, flex=True)
    assert kernel_of(with_dropout) == "document_attention_dense"

    def fail(*args, **kwargs):
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(attention, "flex_attention", fail)
    model = make_model("llama")
    use_document_attention(model, flex=True)
    assert kernel_of(model) == "document_attention_dense"


@pytest.mark.parametrize("family", ["opt", "gpt_neo"])
def test_a_model_that_no_shared_mask_fits_keeps_its_attention(family, uncompiled):
    model = tiny_model(tiny_config(family))
    kernel = kernel_of(model)
    use_document_attention(model, flex=True)
    assert kernel_of(model) == kernel


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
def test_steps_share_the_compiled_attention_and_mask(monkeypatch):
    """Compiled for a CPU, FlexAttention has no backward pass and wrong results for few tokens."""
    model = make_model("llama").eval()
    monkeypatch.setattr(attention, "_run_training_passes", lambda model: None)
    monkeypatch.setattr(attention, "keeps_documents_apart", lambda model: True)
    graphs = []
    with torch.no_grad():
        use_document_attention(model, flex=True)
        for seed in range(3):
            LanguageModelLoss(model)(*make_batch(seed))
            graphs.append(counters["stats"]["unique_graphs"])
    assert kernel_of(model) == "document_attention_blocks"
    assert graphs[0] == graphs[1] == graphs[2] > 0
