import logging
from pathlib import Path

import pytest
import torch
from transformers import GPT2LMHeadModel, PreTrainedModel

from llm.errors import ConfigError
from llm.models.build import set_special_tokens
from llm.models.loss import LanguageModelLoss
from llm.models.patches.gelu import FusedTanhGELU
from llm.models.sampling import sample_text
from llm.models.sizes import parameter_counts
from tests.extensions.moe.families import family_config
from tests.support.families import every_family
from tests.support.models import VOCAB_SIZE, tiny_config, tiny_model
from tests.support.tokenizers import tiny_tokenizer


@pytest.fixture
def trained_gptj(tmp_path: Path) -> tuple[PreTrainedModel, str]:
    model = tiny_model(tiny_config("gptj"))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.01)
    model.save_pretrained(tmp_path / "gptj")
    return model, str(tmp_path / "gptj")


def test_weights_are_taken_from_a_folder_bit_for_bit(
    trained_gptj: tuple[PreTrainedModel, str],
) -> None:
    saved, folder = trained_gptj
    model = tiny_model(tiny_config("gptj"), weights_from=folder)

    assert model.training
    for name, weight in saved.state_dict().items():
        assert torch.equal(model.state_dict()[name], weight), name


def test_half_precision_weights_are_trained_in_fp32(
    trained_gptj: tuple[PreTrainedModel, str],
) -> None:
    saved, folder = trained_gptj
    saved.to(torch.bfloat16).save_pretrained(folder)
    model = tiny_model(tiny_config("gptj"), weights_from=folder)

    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


@pytest.mark.parametrize(
    ("is_pretrained", "ends", "expected"),
    [
        (False, 2, 0),
        (False, [2, 0], 0),
        (True, 0, 0),
        (True, [2, 0], [2, 0]),  # each of them ends a text
        (True, [2, 3], 0),  # of another tokenizer
    ],
)
def test_the_end_of_text_is_the_tokenizers(is_pretrained, ends, expected) -> None:
    config = tiny_config("llama", bos_token_id=1, eos_token_id=ends, pad_token_id=3)
    model = tiny_model(config)
    set_special_tokens(model, tiny_tokenizer(), is_pretrained=is_pretrained)

    for settings in (model.config, model.generation_config):
        assert settings.eos_token_id == expected
        of_tokenizer = expected != ends
        assert settings.bos_token_id == (None if of_tokenizer or not is_pretrained else 1)
        assert settings.pad_token_id == (None if of_tokenizer or not is_pretrained else 3)


def test_a_tokenizer_without_an_end_leaves_no_end_of_another() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.eos_token = None
    model = tiny_model(tiny_config("llama", eos_token_id=2))
    set_special_tokens(model, tokenizer, is_pretrained=False)

    assert model.config.eos_token_id is model.generation_config.eos_token_id is None


def test_padding_beyond_the_vocabulary_is_left_out() -> None:
    """As in the defaults of GLM, whose vocabulary is larger."""
    model = tiny_model(tiny_config("llama", pad_token_id=151329))

    assert model.model.embed_tokens.padding_idx is None


def test_a_head_without_padding_has_a_row_for_each_token() -> None:
    """Inkling's default, for another vocabulary, is a head of 200,058 rows."""
    model = tiny_model(family_config("inkling2_text"))

    assert model.get_output_embeddings().out_features == VOCAB_SIZE


PADDED = ("gemma", "llama", "mistral", "mixtral", "olmo2", "opt", "phi", "qwen2", "qwen3")


@pytest.mark.parametrize("tied_gradients", [False, True])
@pytest.mark.parametrize("family", PADDED)
def test_the_padding_token_learns_as_any_other_token(family: str, tied_gradients: bool) -> None:
    gradients = []
    for padding in (7, None):
        model = tiny_model(tiny_config(family, pad_token_id=padding), tied_gradients=tied_gradients)
        input_ids = torch.tensor([[5, 7, 9, 7, 7, 4]])
        LanguageModelLoss(model.eval())(input_ids, input_ids)[0].backward()
        gradients.append(model.get_input_embeddings().weight.grad)
        assert model.config.pad_token_id == padding

    assert gradients[0][7].any()
    assert torch.equal(*gradients)


def test_the_padding_token_of_loaded_weights_learns(tmp_path: Path) -> None:
    config = tiny_config("llama", pad_token_id=7)
    tiny_model(config).save_pretrained(tmp_path)

    assert tiny_model(config, weights_from=str(tmp_path)).model.embed_tokens.padding_idx is None


def test_weights_of_another_size_are_refused(trained_gptj: tuple[PreTrainedModel, str]) -> None:
    with pytest.raises(ConfigError, match="do not fit the gptj configuration"):
        tiny_model(tiny_config("gptj", n_embd=64), weights_from=trained_gptj[1])


def test_a_folder_without_weights_is_refused_as_a_source_of_weights(tmp_path: Path) -> None:
    tiny_config("gpt2").save_pretrained(tmp_path)

    with pytest.raises(ConfigError, match="no readable weights"):
        tiny_model(tiny_config("gpt2"), weights_from=str(tmp_path))


def test_a_configuration_that_the_library_cannot_build_is_refused() -> None:
    config = tiny_config("llama")
    config.rope_parameters = {"rope_type": "spiral", "rope_theta": 10000.0}
    with pytest.raises(ConfigError, match="model cannot be built: the key 'spiral' is missing"):
        tiny_model(config)


def test_a_larger_tokenizer_enlarges_a_fresh_embedding_with_a_message(
    caplog: pytest.LogCaptureFixture,
) -> None:
    config = tiny_config("gpt2")
    with caplog.at_level(logging.INFO, logger="llm.models"):
        model = tiny_model(config, vocab_size=333)

    assert model.get_input_embeddings().weight.shape == (333, 32)
    assert (model.config.vocab_size, config.vocab_size) == (333, 320)
    assert "333 tokens and the embedding 320 rows" in caplog.text


def test_a_larger_tokenizer_enlarges_a_loaded_embedding_alike_every_time(
    trained_gptj: tuple[PreTrainedModel, str],
) -> None:
    saved, folder = trained_gptj
    first, second = (
        tiny_model(tiny_config("gptj"), weights_from=folder, vocab_size=333) for _ in range(2)
    )
    embedding = first.get_input_embeddings().weight

    assert torch.equal(embedding[:320], saved.get_input_embeddings().weight)
    assert torch.equal(embedding, second.get_input_embeddings().weight)
    assert embedding[320:].std() > 0
    assert first.config.vocab_size == 333


def test_a_smaller_tokenizer_leaves_the_embedding_alone() -> None:
    assert tiny_model(tiny_config("gpt2"), vocab_size=300).config.vocab_size == 320


@pytest.mark.parametrize("family", ["gpt2", "gptj", "llama"])
def test_padding_adds_zero_rows_that_the_configuration_does_not_show(family: str) -> None:
    plain = tiny_model(tiny_config(family))
    padded = tiny_model(tiny_config(family), pad_vocab_to_multiple_of=128)

    assert padded.config.vocab_size == 320
    for get in (PreTrainedModel.get_input_embeddings, PreTrainedModel.get_output_embeddings):
        for before, after in zip(get(plain).parameters(), get(padded).parameters(), strict=True):
            assert len(after) == 384
            assert torch.equal(after[:320], before)
            assert not after[320:].any()


def test_biases_are_held_at_zero_even_when_loaded(
    trained_gptj: tuple[PreTrainedModel, str], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="llm.models"):
        model = tiny_model(tiny_config("gptj"), weights_from=trained_gptj[1], no_bias=True)
    biases = {name: p for name, p in model.named_parameters() if name.endswith(".bias")}

    assert len(biases) == 8
    assert not any(bias.any() or bias.requires_grad for bias in biases.values())
    assert all(p.requires_grad for name, p in model.named_parameters() if name not in biases)
    assert "8 biases are held at zero (--no_bias); 8 of them were not zero" in caplog.text


@every_family
def test_recomputed_activations_give_the_same_gradients(family: str) -> None:
    input_ids = torch.randint(320, (2, 12), generator=torch.Generator().manual_seed(0))
    gradients = []
    for recompute in ("none", "full", "selective"):
        config = tiny_config(family)
        for name in vars(config):
            if "dropout" in name or name.endswith("pdrop"):
                setattr(config, name, 0.0)
        model = tiny_model(config, activation_checkpointing=recompute)
        model(input_ids, labels=input_ids, use_cache=False).loss.backward()
        gradients.append([parameter.grad for parameter in model.parameters()])

    for plain, *recomputed in zip(*gradients, strict=True):
        for gradient in recomputed:
            torch.testing.assert_close(gradient, plain)


def test_a_model_that_cannot_recompute_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GPT2LMHeadModel, "supports_gradient_checkpointing", False)

    with pytest.raises(ConfigError, match="--activation_checkpointing full is not offered by gpt2"):
        tiny_model(tiny_config("gpt2"), activation_checkpointing="full")


@pytest.mark.parametrize(("family", "offers"), [("gpt2", "eager, sdpa"), ("bloom", "eager")])
def test_an_attention_that_the_model_lacks_is_refused_with_what_it_has(
    family: str, offers: str
) -> None:
    with pytest.raises(ConfigError, match=f"flex_attention .* {family}, which offers {offers}"):
        tiny_model(tiny_config(family), attention_implementation="flex_attention")


def test_the_attention_asked_for_is_used() -> None:
    model = tiny_model(tiny_config("gpt2"), attention_implementation="eager")

    assert model.config._attn_implementation == "eager"


def test_parameters_are_counted_by_kind() -> None:
    tied = parameter_counts(tiny_model(tiny_config("gpt2"), no_bias=True))
    untied = parameter_counts(tiny_model(tiny_config("llama")))

    # gpt2: (320 tokens + 64 positions) x 32; llama: 320 x 32 in and 320 x 32 out.
    assert (tied["embedding"], untied["embedding"]) == (12_288, 20_480)
    assert (tied["total"], tied["other"]) == (37_760, 25_472)
    # Of width 32: 9 in each layer's attention, feed-forward and norms twice over, 1 at the end.
    assert tied["frozen"] == 2 * (3 + 1 + 4 + 1 + 1 + 1) * 32 + 32
    assert tied["trainable"] + tied["frozen"] == tied["total"]


@every_family
def test_every_family_writes_the_same_sample_for_the_same_seed(family: str) -> None:
    tokenizer = tiny_tokenizer()
    model = tiny_model(tiny_config(family), pad_vocab_to_multiple_of=128)
    samples = [
        sample_text(model, tokenizer, prompt="The king", max_new_tokens=12, seed=seed)
        for seed in (3, 3, 4)
    ]

    assert samples[0] == samples[1] != samples[2]
    assert samples[0].startswith("The king")
    assert model.training


def test_a_sample_ends_where_the_positions_do() -> None:
    model = tiny_model(tiny_config("gpt2"))

    text = sample_text(model, tiny_tokenizer(), prompt="a " * 100, max_new_tokens=1000, seed=0)
    assert text


def test_a_sample_may_begin_with_nothing() -> None:
    text = sample_text(
        tiny_model(tiny_config("gpt2")), tiny_tokenizer(), prompt="", max_new_tokens=8, seed=0
    )

    assert text


def test_tokens_without_a_name_are_never_written() -> None:
    tokenizer = tiny_tokenizer()
    model = tiny_model(tiny_config("gptj"), pad_vocab_to_multiple_of=128)
    with torch.no_grad():
        model.lm_head.bias[len(tokenizer) :] = 100.0

    text = sample_text(model, tokenizer, prompt="a", max_new_tokens=20, seed=0)
    assert len(text) > 1


@pytest.mark.parametrize("family", ["gpt2", "gpt_neo", "gptj", "phi"])
def test_a_fused_gelu_computes_the_same_loss_and_gradients(family):
    config = tiny_config(family)
    generator = torch.Generator().manual_seed(0)
    input_ids = torch.randint(320, (2, 21), generator=generator)
    found = []
    for fused in (False, True):
        model = tiny_model(config, fused_gelu=fused).eval()
        assert any(isinstance(module, FusedTanhGELU) for module in model.modules()) == fused
        loss = model(input_ids=input_ids, labels=input_ids).loss
        loss.backward()
        found.append((loss.detach(), {name: p.grad for name, p in model.named_parameters()}))
    (plain, plain_gradients), (fused_loss, fused_gradients) = found
    torch.testing.assert_close(fused_loss, plain, rtol=1e-6, atol=0)
    assert fused_gradients.keys() == plain_gradients.keys()
    for name, gradient in plain_gradients.items():
        torch.testing.assert_close(fused_gradients[name], gradient, rtol=1e-4, atol=1e-7)


def test_a_fused_gelu_leaves_the_configuration_as_it_was():
    model = tiny_model(tiny_config("gpt2"), fused_gelu=True)
    assert model.config.activation_function == "gelu_new"
