"""Tiny mixtures of experts with their routers, without a run around them."""

from types import SimpleNamespace
from typing import Any

import torch
from transformers import (
    DeepseekV4Config,
    Ernie4_5_MoeConfig,
    Glm4MoeConfig,
    JetMoeConfig,
    PhimoeConfig,
    PreTrainedConfig,
    PreTrainedModel,
)

from llm.extensions.moe.balanced_routers import Routers
from llm.extensions.moe.options import MoEExtension
from llm.models.loss import LanguageModelLoss
from llm.runtime.labels import IGNORED
from llm.trainers.gpt.extensions import GPTConfig
from llm.trainers.gpt.seams import LoopExtension
from tests.support.models import tiny_config, tiny_model

LENGTH = 16
_NARROW = {
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": None,
    "moe_intermediate_size": 16,
    "num_experts_per_tok": 2,
}


def mixtral(**changes: Any) -> PreTrainedConfig:
    """Softmax scores and no bias."""
    return tiny_config("mixtral", **changes)


def glm4_moe(**changes: Any) -> PreTrainedConfig:
    """Sigmoid scores and a bias in a buffer."""
    groups = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 0}
    return Glm4MoeConfig(**{**_NARROW, **groups, "head_dim": 16, **changes})


def ernie4_5_moe(**changes: Any) -> PreTrainedConfig:
    """Softmax scores and a bias that is a parameter, [1, experts]."""
    sizes = {"moe_num_experts": 4, "moe_k": 2, "moe_layer_start_index": 0}
    return Ernie4_5_MoeConfig(**{**_NARROW, **sizes, **changes})


def deepseek_v4(*kinds: str) -> PreTrainedConfig:
    """Layers of two kinds: `moe`, and `hash_moe` without logits."""
    sizes = {"n_routed_experts": 4, "head_dim": 16, "q_lora_rank": 16, "o_lora_rank": 16}
    attention = ["heavily_compressed_attention"] * len(kinds)
    more = {"mlp_layer_types": list(kinds), "layer_types": attention, "o_groups": 2}
    return DeepseekV4Config(**_NARROW | sizes | more)


def phimoe(**changes: Any) -> PreTrainedConfig:
    """Scores of a sparse mixer, which no function of the logits gives."""
    return PhimoeConfig(**_NARROW | {"num_local_experts": 4} | changes)


def jetmoe() -> PreTrainedConfig:
    """Experts without the common interface."""
    return JetMoeConfig(**_NARROW, kv_channels=16, num_local_experts=2)


def loop_of(
    model: PreTrainedModel, *, pretrained: bool = False, **options: Any
) -> LoopExtension | None:
    """The part of the extension in a run on one rank."""
    extension, context = extension_of(model, pretrained=pretrained, **options)
    return extension.make_loop_extension(context)


def extension_of(
    model: PreTrainedModel, *, pretrained: bool = False, **options: Any
) -> tuple[MoEExtension, Any]:
    """The extension, and the context that a run on one rank gives it."""
    strategy = SimpleNamespace(
        model=model,
        loss=LanguageModelLoss(model),
        device=torch.device("cpu"),
        world_size=1,
        token_weight=1.0,
        loss_scale=lambda: torch.ones(()),
        skipped=torch.zeros(()),
    )
    extension = MoEExtension(GPTConfig(**options))
    weights_from = "a folder" if pretrained else None
    run = SimpleNamespace(weights_from=weights_from, init_from=None)
    return extension, SimpleNamespace(run=run, strategy=strategy, model=model)


def routers_of(config: PreTrainedConfig, **options: Any) -> tuple[PreTrainedModel, Routers]:
    """A model in training mode, and its routers."""
    model = tiny_model(config)
    routers = loop_of(model, **options)
    assert isinstance(routers, Routers)
    return model, routers


def tokens(samples: int = 4, *, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and labels."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(320, (samples, LENGTH + 1), generator=generator)
    return ids[:, :-1], ids[:, 1:]


def take_step(
    model: PreTrainedModel,
    routers: Routers,
    *,
    step: int = 1,
    micro_batches: int = 1,
    padding_samples: int = 0,
) -> None:
    """Run the passes of a step with 64 tokens, and end it; weights do not change.

    Padding samples are copies of the first one without labels, as in a short last step.
    """
    model.zero_grad()
    input_ids, labels = tokens(seed=step)
    num_tokens = labels.numel()
    padding = [0] * padding_samples
    input_ids = torch.cat([input_ids, input_ids[padding]])
    labels = torch.cat([labels, torch.full_like(labels[padding], IGNORED)])
    routers._strategy.token_weight = 1 / num_tokens
    parts = zip(input_ids.chunk(micro_batches), labels.chunk(micro_batches), strict=True)
    for part in parts:
        (routers._strategy.loss(*part)[0] / num_tokens).backward()
    routers.after_step(step, SimpleNamespace(num_tokens=num_tokens))
