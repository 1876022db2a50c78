from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    CohereConfig,
    Gemma2Config,
    GraniteConfig,
    PreTrainedConfig,
    PreTrainedModel,
    ProphetNetConfig,
)

from llm.models.cross_entropy import _compute_softmax_losses, chunked_cross_entropy
from llm.models.loss import (
    LanguageModelLoss,
    has_plain_head,
)
from llm.models.loss_chunks import LossChunks
from tests.support.families import every_family
from tests.support.models import tiny_config, tiny_model

NARROW = {
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
TEN_ROWS = 10 * 4 * 320
"""Memory of the logits of ten tokens: the 63 tokens below make seven chunks, the last of three."""


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    input_ids = torch.randint(320, (3, 21), generator=generator)
    labels = torch.randint(320, (3, 21), generator=generator)
    labels[0, :5] = -100
    return input_ids, labels


def reference_loss(model: PreTrainedModel, vocab_size: int = 320) -> Tensor:
    input_ids, labels = batch()
    logits = model(input_ids, use_cache=False).logits[..., :vocab_size].float()
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


def gradients(model: PreTrainedModel, loss: Tensor) -> dict[str, Tensor | None]:
    model.zero_grad()
    loss.backward()
    return {name: p.grad for name, p in model.named_parameters()}


def assert_same_gradients(
    actual: dict[str, Tensor | None], expected: dict[str, Tensor | None]
) -> None:
    whole = torch.cat([g.flatten() for g in expected.values() if g is not None]).norm()
    for name, reference in expected.items():
        gradient = actual[name]
        assert gradient is not None, name
        assert reference is not None, name
        # A gradient that cancels to nothing is compared on the scale of all of them.
        assert (gradient - reference).norm() <= 1e-5 * reference.norm() + 1e-8 * whole, name


@pytest.mark.parametrize("chunk_bytes", [None, TEN_ROWS])
@every_family
def test_loss_and_gradients_are_those_of_the_full_logits(
    family: str, chunk_bytes: int | None
) -> None:
    model = tiny_model(tiny_config(family)).eval()
    loss = LanguageModelLoss(model, chunk_bytes=chunk_bytes)
    reference = reference_loss(model)
    expected = gradients(model, reference)

    objective, (loss_sum,) = loss(*batch())
    assert loss.is_chunked
    assert not loss_sum.requires_grad
    torch.testing.assert_close(loss_sum, reference.detach(), rtol=1e-6, atol=0)
    assert_same_gradients(gradients(model, objective), expected)


@pytest.mark.parametrize("family", ["gpt2", "gptj"])
@pytest.mark.parametrize("chunked", [True, False])
def test_padded_vocabulary_rows_do_not_change_the_loss_and_get_no_gradient(
    family: str, chunked: bool
) -> None:
    plain = tiny_model(tiny_config(family)).eval()
    padded = tiny_model(tiny_config(family), pad_vocab_to_multiple_of=128).eval()

    expected, _ = LanguageModelLoss(plain, is_chunked=chunked)(*batch())
    objective, _ = LanguageModelLoss(padded, is_chunked=chunked)(*batch())
    torch.testing.assert_close(objective, expected, rtol=1e-6, atol=0)
    gradients(padded, objective)
    for parameter in padded.get_output_embeddings().parameters():
        assert not parameter.grad[320:].any()
        assert parameter.grad[:320].any()


@pytest.mark.parametrize("chunked", [True, False])
def test_no_labels_make_a_zero_loss_and_zero_gradients(chunked: bool) -> None:
    model = tiny_model(tiny_config("gptj"))
    input_ids, labels = batch()
    objective, (loss_sum,) = LanguageModelLoss(model, is_chunked=chunked)(
        input_ids, torch.full_like(labels, -100)
    )

    assert loss_sum == 0
    assert all(g is not None and not g.any() for g in gradients(model, objective).values())


def test_a_frozen_head_gets_no_gradient_and_passes_one_on() -> None:
    model = tiny_model(tiny_config("phi")).eval()
    expected = gradients(model, reference_loss(model))
    model.lm_head.requires_grad_(False)
    actual = gradients(model, LanguageModelLoss(model)(*batch())[0])

    assert actual.pop("lm_head.weight") is None
    assert actual.pop("lm_head.bias") is None
    assert_same_gradients(actual, {name: expected[name] for name in actual})


def test_nothing_is_differentiated_without_gradients() -> None:
    loss = LanguageModelLoss(tiny_model(tiny_config("gpt2")).eval())
    with torch.no_grad():
        objective, (loss_sum,) = loss(*batch())

    assert not objective.requires_grad
    torch.testing.assert_close(loss_sum, reference_loss(loss.model).detach(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", ["gpt2", "llama", "phi"])
def test_autocast_gives_a_close_loss_and_fp32_gradients(family: str, dtype: torch.dtype) -> None:
    model = tiny_model(tiny_config(family)).eval()
    expected = gradients(model, reference_loss(model))
    with torch.autocast("cpu", dtype=dtype):
        objective, (loss_sum,) = LanguageModelLoss(model, chunk_bytes=TEN_ROWS)(*batch())
    actual = gradients(model, objective)

    assert (objective.dtype, loss_sum.dtype) == (torch.float32, torch.float32)
    torch.testing.assert_close(loss_sum, reference_loss(model).detach(), rtol=1e-4, atol=0)
    for name in ("embedding", "head"):
        weight = getattr(model, f"get_{'input' if name == 'embedding' else 'output'}_embeddings")()
        key = next(n for n, p in model.named_parameters() if p is weight.weight)
        reference, gradient = expected[key], actual[key]
        assert reference is not None
        assert gradient is not None
        assert gradient.dtype == torch.float32
        assert (gradient - reference).norm() < 0.02 * reference.norm()


def test_capped_logits_are_seen_and_computed_in_full() -> None:
    config = Gemma2Config(**NARROW, head_dim=16)
    model = tiny_model(config).eval()
    loss = LanguageModelLoss(model)
    expected = gradients(model, reference_loss(model))
    objective, _ = loss(*batch())

    assert not loss.is_chunked
    assert_same_gradients(gradients(model, objective), expected)


@every_family
def test_the_output_head_is_recognised_on_a_model_without_weights(family: str) -> None:
    model = tiny_model(tiny_config(family), device=torch.device("meta"))
    names = list(model.state_dict())

    assert has_plain_head(model)
    assert list(model.state_dict()) == names


@pytest.mark.parametrize(
    "config",
    [
        Gemma2Config(**NARROW, head_dim=16, final_logit_softcapping=30.0),
        CohereConfig(**NARROW, logit_scale=0.5),
        GraniteConfig(**NARROW, logits_scaling=2.0),
    ],
)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_logits_that_are_capped_or_scaled_are_seen(config: PreTrainedConfig, device: str) -> None:
    assert not has_plain_head(tiny_model(config, device=torch.device(device)))


def test_a_head_of_another_stream_than_the_first_is_seen() -> None:
    config = ProphetNetConfig(
        vocab_size=320, hidden_size=32, num_decoder_layers=1, num_decoder_attention_heads=2
    )
    assert not has_plain_head(tiny_model(config))


def test_the_probe_leaves_the_models_mode_alone() -> None:
    model = tiny_model(tiny_config("gpt2"))

    assert has_plain_head(model)
    assert model.training


def test_the_head_of_a_model_on_fake_tensors_is_found_plain() -> None:
    model = tiny_model(tiny_config("gpt2"))
    with FakeTensorMode():
        model._apply(lambda t: torch.empty(t.shape, dtype=t.dtype, device="cpu"))

        assert has_plain_head(model)


@pytest.mark.parametrize("chunked", [None, False])
def test_a_configuration_with_router_logits_has_the_loss_of_one_without(chunked) -> None:
    model = tiny_model(tiny_config("mixtral", output_router_logits=True)).eval()
    loss = LanguageModelLoss(model, is_chunked=chunked)
    objective, (loss_sum,) = loss(*batch())

    assert loss.is_chunked is (chunked is None)
    torch.testing.assert_close(loss_sum, reference_loss(model).detach())
    assert torch.equal(objective.detach(), loss_sum)


@pytest.mark.parametrize("family", ["gpt2", "gptj"])
@pytest.mark.parametrize("chunked", [True, False])
def test_predictions_are_the_likeliest_tokens_that_exist(family: str, chunked: bool) -> None:
    model = tiny_model(tiny_config(family), pad_vocab_to_multiple_of=128).eval()
    input_ids, labels = batch()
    expected = model(input_ids).logits[..., :320].log_softmax(dim=-1)

    loss = LanguageModelLoss(model, is_chunked=chunked, chunk_bytes=TEN_ROWS)
    likeliest, log_probs = loss.predict_tokens(input_ids, labels)

    assert torch.equal(likeliest, expected.argmax(dim=-1))
    of_labels = expected.gather(2, labels.clamp(min=0).unsqueeze(2)).squeeze(2)
    torch.testing.assert_close(log_probs, of_labels.where(labels >= 0, 0.0))


@every_family
def test_every_parameter_has_a_gradient_in_every_step(family: str) -> None:
    # One token visits two of four experts: distributed training waits for all gradients.
    model = tiny_model(tiny_config(family))
    input_ids, labels = batch()
    objective, _ = LanguageModelLoss(model)(input_ids[1:2, :1], labels[1:2, :1])

    assert [n for n, gradient in gradients(model, objective).items() if gradient is None] == []


def test_an_fp16_head_gradient_does_not_overflow_in_a_large_chunk():
    model = tiny_model(tiny_config("gpt2"))
    hidden = torch.full((4096, 32), 100.0)
    labels = torch.full((4096,), 7)
    weight = model.get_output_embeddings().weight

    with torch.autocast("cpu", torch.float16):
        loss, _ = chunked_cross_entropy(
            hidden, weight, None, labels, vocab_size=320, chunk_rows=4096
        )
    (loss / 4096).backward()

    # Of 4,096 tokens with the label 7 each adds about -100 to its row.
    assert weight.grad[7].mean().item() == pytest.approx(-100.0, rel=0.01)


class ProductSizes(TorchDispatchMode):
    """Collects the sizes of the matrices that are multiplied."""

    def __init__(self):
        super().__init__()
        self.sizes = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._schema.name in ("aten::mm", "aten::addmm", "aten::addmm_"):
            self.sizes |= {size for matrix in args[-2:] for size in matrix.shape}
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("family", ["gpt2", "gptj", "phi"])  # a tied head, an untied one, a bias
@pytest.mark.parametrize("tied_gradients", [True, False])
def test_an_odd_vocabulary_is_multiplied_in_multiples_of_128(family, tied_gradients):
    config = tiny_config(family, vocab_size=321)
    model = tiny_model(config, tied_gradients=tied_gradients).eval()
    reference = reference_loss(model, vocab_size=321)
    expected = gradients(model, reference)

    loss = LanguageModelLoss(model, is_aligned=True)
    with ProductSizes() as products:
        objective, (loss_sum,) = loss(*batch())
        actual = gradients(model, objective)
    assert 384 in products.sizes
    assert 321 not in products.sizes
    torch.testing.assert_close(loss_sum, reference.detach(), rtol=1e-6, atol=0)
    assert_same_gradients(actual, expected)
    for parameter in model.get_output_embeddings().parameters():
        assert parameter.grad.shape[0] == 321


def test_a_cpu_multiplies_an_odd_vocabulary_as_it_is():
    model = tiny_model(tiny_config("gptj", vocab_size=321))
    loss = LanguageModelLoss(model)
    with ProductSizes() as products:
        loss(*batch())

    assert 321 in products.sizes
    assert 384 not in products.sizes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_aligned_products_under_autocast_give_the_same_gradients(dtype):
    model = tiny_model(tiny_config("phi", vocab_size=321)).eval()
    found = []
    for aligned in (False, True):
        with torch.autocast("cpu", dtype):
            objective, _ = LanguageModelLoss(model, is_aligned=aligned)(*batch())
        found.append(gradients(model, objective))

    for name, reference in found[0].items():
        assert found[1][name].dtype == torch.float32
        # The head's products may be summed in another order, in half precision.
        assert (found[1][name] - reference).norm() <= 0.02 * reference.norm(), name


def test_chunks_are_twice_as_long_where_the_gradient_replaces_the_logits():
    model = tiny_model(tiny_config("gpt2"))
    ids = torch.zeros(8, 64, dtype=torch.long)  # 512 tokens
    rows: list[int] = []

    def recorded(logits: torch.Tensor, *arguments: Any) -> Any:
        rows.append(len(logits))
        return _compute_softmax_losses(None, logits, *arguments)

    chunks = LossChunks(num_bytes=128 * 384 * 4, num_multiprocessors=None)  # 128 tokens in fp32
    for softmax in (None, recorded):
        loss = LanguageModelLoss(model, is_aligned=True, chunks=chunks, softmax=softmax)
        assert loss(ids, ids)[0].isfinite()
    assert rows == [256, 256]


class OperationCounts(TorchDispatchMode):
    """Counts the operations inside the context by name, without views."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not func.is_view:
            self.counts[func._schema.name.removeprefix("aten::")] += 1
        return func(*args, **(kwargs or {}))


def test_a_softmax_kernel_leaves_a_cast_and_products_for_each_chunk():
    def kernel(
        logits: Tensor, labels: Tensor, num_vocab_columns: int, needs_gradient: bool, z_loss: float
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        return torch.empty(len(logits)), None, logits

    hidden, weight = torch.empty(40, 32, requires_grad=True), torch.empty(320, 32)
    labels = torch.zeros(40, dtype=torch.long)
    with FakeTensorMode(allow_non_fake_inputs=True), OperationCounts() as forward:
        with torch.autocast("cpu", torch.bfloat16):
            loss, _ = chunked_cross_entropy(
                *(hidden, weight, None, labels), vocab_size=320, chunk_rows=10, softmax=kernel
            )
        with OperationCounts() as backward:
            loss.backward()
    # Four chunks: logits and the gradient of the hidden states; the weight needs no gradient.
    assert forward.counts["mm"] - backward.counts["mm"] == 8
    assert forward.counts["_to_copy"] == 1 + 4  # of the weight, and of the hidden states
    assert forward.counts["mul"] == backward.counts["mul"] == 1  # by the gradient of the loss
    assert forward.counts["ne"] == 0  # no mask
