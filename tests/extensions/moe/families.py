"""Tiny configurations of all causal language models of transformers with experts."""

import inspect
import re
from pathlib import Path
from typing import Any

import transformers
from transformers import CONFIG_MAPPING, PreTrainedConfig
from transformers.models.auto.configuration_auto import model_type_to_module_name
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.support.models import MIXTURES, VOCAB_SIZE, tiny_config

_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "sliding_window": 8,
    "attention_dropout": 0.0,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": None,
    # experts
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "shared_intermediate_size": 16,
    "num_experts": 4,
    "n_routed_experts": 4,
    "num_local_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_k": 2,
    "moe_topk": 2,
    "n_group": 1,
    "topk_group": 1,
    "num_expert_group": 1,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "moe_num_shared_experts": 1,
    "first_k_dense_replace": 0,
    "moe_layer_start_index": 0,
    "num_dense_layers": 0,
    "mlp_only_layers": [],
    "expert_layer_period": 2,
    "expert_layer_offset": 1,
    # latent and sparse attention
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "qk_head_dim": 16,
    "v_head_dim": 16,
    "index_n_heads": 2,
    "index_head_dim": 16,
    "index_topk": 4,
    # state spaces and linear attention
    "attn_layer_period": 2,
    "attn_layer_offset": 1,
    "mamba_d_state": 8,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_n_groups": 1,
    "mamba_dt_rank": 4,
    "use_mamba_kernels": False,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
_CHANGES: dict[str, dict[str, Any]] = {
    "beam": {"mlp_layer_types": ["sparse", "sparse"]},
    "doge": {"is_moe": True},
    "gemma4_text": {
        "enable_moe_block": True,
        "top_k_experts": 2,
        "global_head_dim": 8,
        "hidden_size_per_layer_input": 0,
        "num_kv_shared_layers": 0,
    },
    "axk2": {"num_key_value_heads": 4},
    "dots3_note_text": {"num_key_value_heads": 4},
    "dbrx": {
        "d_model": 32,
        "n_heads": 4,
        "n_layers": 2,
        "max_seq_len": 64,
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4},
        "ffn_config": {
            "hidden_size": 32,
            "ffn_hidden_size": 16,
            "moe_num_experts": 4,
            "moe_top_k": 2,
        },
    },
    "kimi_linear": {"linear_head_dim": 8, "linear_num_heads": 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "nemotron_h": {"mamba_num_heads": 4, "mamba_head_dim": 8, "ssm_state_size": 8, "n_groups": 1},
    "zaya": {"num_experts_per_tok": 1},
}

COVERED = (
    *("afmoe", "aria_text", "axk1", "axk2", "bailing_hybrid", "beam", "cohere2_moe"),
    *("dbrx", "deepseek_v2", "gemma4_text"),
    *("deepseek_v3", "deepseek_v32", "deepseek_v4", "dots1", "dots3_note_text", "ernie4_5_moe"),
    *("exaone_moe", "flex_olmo", "flint", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa", "gpt_oss"),
    *("granitemoe", "granitemoe_swa", "granitemoehybrid", "granitemoeshared", "hunyuan_v1_moe"),
    *("hy_v3", "hy_v4", "inkling2_loop_text", "inkling2_text", "inkling_text", "jamba"),
    *("kimi_linear", "kolibri1", "laguna", "lara_mini", "lfm2_moe", "mellum", "mimo_v2_flash"),
    *("minimax", "minimax_m2", "minimax_m3_vl_text", "mixtral", "nemotron_h", "olmoe", "phimoe"),
    *("qwen2_moe", "qwen3_5_moe_text", "qwen3_moe", "qwen3_next", "qwen4_exp_text", "solar_open"),
)
"""Families that are balanced and measured."""
UNMEASURED = {
    "doge": "Its experts are embeddings of keys, without the common interface.",
    "jetmoe": "Its experts lack the common interface; its attention has experts too.",
    "llama4_text": "Its experts lack the common interface: each computes all tokens.",
    "longcat_flash": "Some of its experts are identities, without the common interface.",
    "zaya": "Its router skips experts for some tokens, and says expert 0 for them.",
}
"""Families that train unbalanced, with the reason."""
OF_SEVERAL_MODELS = {
    "dots3_note": "dots3_note_text",
    "gemma4": "gemma4_text",
    "llama4": "llama4_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
    "qwen4_exp": "qwen4_exp_text",
}
"""Families that also see images, and the family of their text model."""


def families_with_experts() -> set[str]:
    """The types of causal language models in transformers that have a class of experts."""
    models = Path(transformers.__file__).parent / "models"
    modules = {
        path.parent.name
        for path in models.glob("*/modeling_*.py")
        if re.search(r"^class \w*(Expert|MoE|Moe\w*Block|Router)\w*\(", path.read_text(), re.M)
    }
    types = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    return {name for name in types if model_type_to_module_name(name) in modules}


def family_config(family: str) -> PreTrainedConfig:
    """A configuration with two layers of 4 experts, width 32 and 320 tokens."""
    if family in MIXTURES or family == "mixtral":
        return tiny_config(family)
    kind = CONFIG_MAPPING[family]
    names = {*kind().to_dict(), *kind.attribute_map, *inspect.signature(kind).parameters}
    sizes = _SIZES | _CHANGES.get(family, {})
    return kind(**{name: value for name, value in sizes.items() if name in names})
