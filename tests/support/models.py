"""Tiny models of every family that the product promises to train: two layers, width 32."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import transformers
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, PreTrainedModel

from llm.models.build import build_model
from llm.models.export import export_model
from llm.models.options import ModelOptions
from llm.models.transforms import Transform
from tests.support.tokenizers import tiny_tokenizer

VOCAB_SIZE = 320
MAX_POSITIONS = 64
"""Where a family has learned or stated positions; bloom and mamba know none."""

_CPU = torch.device("cpu")
_GPT2 = {"n_layer": 2, "n_head": 2, "n_embd": 32, "n_positions": MAX_POSITIONS}
_LLAMA = {
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "hidden_size": 32,
    "intermediate_size": 64,
    "max_position_embeddings": MAX_POSITIONS,
}
_NEOX = {
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "max_position_embeddings": MAX_POSITIONS,
}
_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2Config", _GPT2),
    "gpt_neo": (
        "GPTNeoConfig",
        {
            "num_layers": 2,
            "num_heads": 2,
            "hidden_size": 32,
            "attention_types": [[["global", "local"], 1]],
            "window_size": 8,
            "max_position_embeddings": MAX_POSITIONS,
        },
    ),
    "gpt_neox": ("GPTNeoXConfig", _NEOX),
    "gptj": ("GPTJConfig", {**_GPT2, "rotary_dim": 8}),
    "opt": (
        "OPTConfig",
        {
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "hidden_size": 32,
            "word_embed_proj_dim": 32,
            "ffn_dim": 64,
            "max_position_embeddings": MAX_POSITIONS,
        },
    ),
    "bloom": ("BloomConfig", {"n_layer": 2, "n_head": 2, "hidden_size": 32}),
    "llama": ("LlamaConfig", _LLAMA),
    "mistral": ("MistralConfig", {**_LLAMA, "sliding_window": 8}),
    "qwen2": ("Qwen2Config", _LLAMA),
    "qwen3": ("Qwen3Config", {**_LLAMA, "head_dim": 16}),
    "gemma": ("GemmaConfig", {**_LLAMA, "head_dim": 16}),
    "phi": ("PhiConfig", {**_LLAMA, "num_key_value_heads": 2}),
    "falcon": (
        "FalconConfig",
        {
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "hidden_size": 32,
            "max_position_embeddings": MAX_POSITIONS,
        },
    ),
    "stablelm": ("StableLmConfig", {**_LLAMA, "num_key_value_heads": 2}),
    "olmo2": ("Olmo2Config", _LLAMA),
    "mixtral": ("MixtralConfig", {**_LLAMA, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "mamba": (
        "MambaConfig",
        {"num_hidden_layers": 2, "hidden_size": 32, "state_size": 4, "time_step_rank": 2},
    ),
}

FAMILIES = list(_FAMILIES)

_MOE = {**_LLAMA, "moe_intermediate_size": 16, "num_experts_per_tok": 2, "head_dim": 16}
_GROUPED = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 0}
_MLA = {
    "num_key_value_heads": 2,
    "head_dim": 8,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_INDEXER = {"index_n_heads": 2, "index_head_dim": 16, "index_topk": 4}
_MIXTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_moe": ("Qwen3MoeConfig", {**_MOE, "num_experts": 4}),
    "deepseek_v3": ("DeepseekV3Config", {**_MOE, **_GROUPED, **_MLA}),
    "gpt_oss": ("GptOssConfig", {**_MOE, "num_local_experts": 4, "rope_parameters": _ROPE}),
    "glm4_moe": ("Glm4MoeConfig", {**_MOE, **_GROUPED}),
    "olmoe": ("OlmoeConfig", {**_LLAMA, "num_experts": 4, "num_experts_per_tok": 2}),
    "ernie4_5_moe": (
        "Ernie4_5_MoeConfig",
        {
            **_LLAMA,
            "moe_num_experts": 4,
            "moe_k": 2,
            "moe_intermediate_size": 16,
            "moe_num_shared_experts": 1,
            "moe_layer_start_index": 0,
        },
    ),
    "afmoe": ("AfmoeConfig", {**_MOE, "num_experts": 4, "num_dense_layers": 0}),
    "aria_text": (
        "AriaTextConfig",
        {
            **_LLAMA,
            "head_dim": 16,
            "moe_num_experts": 4,
            "moe_topk": 2,
            "moe_num_shared_experts": 1,
        },
    ),
    "deepseek_v32": ("DeepseekV32Config", {**_MOE, **_GROUPED, **_MLA, **_INDEXER}),
    "deepseek_v4": (
        "DeepseekV4Config",
        {
            **_MOE,
            **_GROUPED,
            **_MLA,
            **_INDEXER,
            "o_groups": 2,
            "o_lora_rank": 16,
            "sliding_window": 4,
            "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
            "layer_types": ["compressed_sparse_attention", "heavily_compressed_attention"],
            "mlp_layer_types": ["hash_moe", "moe"],
        },
    ),
    "glm_moe_dsa": ("GlmMoeDsaConfig", {**_MOE, **_GROUPED, **_MLA, **_INDEXER}),
}

MIXTURES = list(_MIXTURES)
"""Mixtures of experts besides mixtral, which is one of the families."""


def tiny_config(family: str, **changes: Any) -> PreTrainedConfig:
    """A configuration of `family` with about two layers, width 32 and 320 tokens."""
    class_name, sizes = (_FAMILIES | _MIXTURES)[family]
    special = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None}
    return getattr(transformers, class_name)(
        **{"vocab_size": VOCAB_SIZE, **special, **sizes, **changes}
    )


PATCHES = {"fused_gelu": "fuse_gelu", "tied_gradients": "tie_gradients"}
"""What `build_model` patches with, by the option of `tiny_model`."""


def tiny_model(
    config: PreTrainedConfig,
    *,
    weights_from: str | None = None,
    seed: int = 1,
    device: torch.device = _CPU,
    vocab_size: int = VOCAB_SIZE,
    transforms: Sequence[Transform] = (),
    **options: Any,
) -> PreTrainedModel:
    """The model of a configuration, built on the CPU, with the patches that `options` name."""
    with ExitStack() as stack:
        for name, patch in PATCHES.items():
            if not options.get(name, False):
                stack.enter_context(mock.patch(f"llm.models.build.{patch}"))
        return build_model(
            model_options(options),
            config,
            weights_from=weights_from,
            seed=seed,
            device=device,
            vocab_size=vocab_size,
            transforms=transforms,
        )


def model_options(options: Mapping[str, Any]) -> ModelOptions:
    """The trainer's options among those of `tiny_model`."""
    return ModelOptions(**{name: value for name, value in options.items() if name not in PATCHES})


def large_config() -> LlamaConfig:
    """Of 200 MB, beside which what else a process takes does not count."""
    return LlamaConfig(
        vocab_size=320,
        hidden_size=512,
        intermediate_size=2048,
        num_hidden_layers=12,
        num_attention_heads=8,
    )


def still_model(family: str = "gpt2", **changes: Any) -> PreTrainedModel:
    """A model without dropout, with transformers' own initial weights for the seed 0."""
    torch.manual_seed(0)
    config = tiny_config(family, **changes)
    for name in [name for name in vars(config) if "dropout" in name or name.endswith("pdrop")]:
        setattr(config, name, 0.0)
    return AutoModelForCausalLM.from_config(config)


def moved_from_its_start(model: PreTrainedModel, by: float = 0.01) -> PreTrainedModel:
    """The model with other weights than initial ones, in the mode of evaluation."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += by * torch.randn(parameter.shape, generator=generator)
    return model.eval()


def export_to(folder: Path, model: PreTrainedModel, **options: Any) -> None:
    """Export a model with the tiny tokenizer."""
    export_model(
        config=model.config,
        state_dict=model.state_dict(),
        folder=folder,
        **{"tokenizer": tiny_tokenizer(), **options},
    )


def remember_across_layers(model) -> None:
    """Let the second layer of a Llama add what the first one has seen."""
    seen = []

    class Remembering(nn.Module):
        def __init__(self, layer, number):
            super().__init__()
            self.layer, self.number = layer, number

        def forward(self, hidden, **kwargs):
            if self.number == 0:
                seen[:] = [hidden * self.layer.input_layernorm.weight.sum()]
            elif seen:
                hidden = hidden + seen[0]
            return self.layer(hidden, **kwargs)

    for number, layer in enumerate(model.model.layers):
        model.model.layers[number] = Remembering(layer, number)
