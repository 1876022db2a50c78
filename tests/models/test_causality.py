"""Models with tokens that see later ones are refused, with weights and without."""

import logging

import pytest
import torch
from transformers import BertConfig, PreTrainedConfig, RobertaConfig, XLMConfig, XLNetConfig

from llm.errors import ConfigError
from llm.models.causality import check_causal, check_meta_model_causal
from tests.support.families import every_family
from tests.support.models import tiny_config, tiny_model

BERT = {"vocab_size": 320, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
XLNET = {"vocab_size": 320, "d_model": 32, "n_layer": 2, "n_head": 2, "d_inner": 64}


@pytest.mark.parametrize(
    ("encoder", "decoder", "remedy"),
    [
        (BertConfig(**BERT), BertConfig(**BERT, is_decoder=True), "is_decoder=true"),
        (RobertaConfig(**BERT), RobertaConfig(**BERT, is_decoder=True), "is_decoder=true"),
        (XLNetConfig(**XLNET), XLNetConfig(**XLNET, attn_type="uni"), "attn_type=uni"),
    ],
    ids=["bert", "roberta", "xlnet"],
)
def test_an_encoder_is_refused_unless_it_is_made_a_decoder(
    encoder: PreTrainedConfig, decoder: PreTrainedConfig, remedy: str
):
    family = encoder.model_type
    sentence = f"In this {family} model, tokens see later tokens, .* --config_overrides {remedy}"
    with pytest.raises(ConfigError, match=sentence):
        check_causal(tiny_model(encoder))
    check_causal(tiny_model(decoder))
    with pytest.raises(ConfigError, match=sentence):
        check_meta_model_causal(tiny_model(encoder, device=torch.device("meta")))
    check_meta_model_causal(tiny_model(decoder, device=torch.device("meta")))


def test_a_model_that_needs_all_blocks_is_checked_with_weights(caplog):
    xlm = XLMConfig(n_words=320, emb_dim=32, n_layers=2, n_heads=2)

    with caplog.at_level(logging.INFO, logger="llm.models"):
        check_meta_model_causal(tiny_model(xlm, device=torch.device("meta")))
    assert "in this xlm model was not checked" in caplog.text
    with pytest.raises(ConfigError, match=r"In this xlm model, .* --config_overrides causal=true"):
        check_causal(tiny_model(xlm))


@every_family
def test_no_token_of_a_family_sees_a_later_one(family):
    model = tiny_model(tiny_config(family))
    check_causal(model)
    assert model.training
    check_meta_model_causal(tiny_model(tiny_config(family), device=torch.device("meta")))
