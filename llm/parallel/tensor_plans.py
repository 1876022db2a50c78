"""Tensor-parallel plans: how each layer of an architecture is sharded.

A plan names a style for each module that is sharded: by columns (its outputs, and with them the
attention heads) or by rows (its inputs); see Shoeybi et al. 2019, arXiv:1909.08053. transformers
has plans for most newer architectures; the plans of GPT-2, GPT-Neo and OPT are here.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from torch import nn
from transformers import CONFIG_MAPPING, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from llm.errors import ConfigError

STYLES = frozenset(
    {
        "colwise",
        "rowwise",
        "colwise_gather_output",
        "rowwise_split_input",
        "embedding_rowwise",
        "replicated_with_grad_allreduce",
    }
)
"""The styles of transformers with contiguous shards of every weight."""


@dataclass(frozen=True, kw_only=True)
class TensorPlan:
    """The sharded modules of a model, and their styles.

    Attributes:
        styles: Style by the module's name; `*` stands for the number of a layer.
        divided_attributes: By the module's name, the attribute to divide by the ranks, such as its
            number of heads.
    """

    styles: Mapping[str, str]
    divided_attributes: Mapping[str, str] = field(default_factory=dict)


_TENSOR_PLANS = {
    "gpt2": TensorPlan(
        styles={
            "transformer.wte": "embedding_rowwise",
            "transformer.h.*.attn.c_attn": "conv1d_heads",
            "transformer.h.*.attn.c_proj": "conv1d_rowwise",
            "transformer.h.*.mlp.c_fc": "conv1d_colwise",
            "transformer.h.*.mlp.c_proj": "conv1d_rowwise",
            "lm_head": "colwise_gather_output",
        },
        divided_attributes={"transformer.h.*.attn": "split_size"},
    ),
    "gpt_neo": TensorPlan(
        styles={
            "transformer.wte": "embedding_rowwise",
            "transformer.h.*.attn.attention.q_proj": "colwise",
            "transformer.h.*.attn.attention.k_proj": "colwise",
            "transformer.h.*.attn.attention.v_proj": "colwise",
            "transformer.h.*.attn.attention.out_proj": "rowwise",
            "transformer.h.*.mlp.c_fc": "colwise",
            "transformer.h.*.mlp.c_proj": "rowwise",
            "lm_head": "colwise_gather_output",
        },
        divided_attributes={"transformer.h.*.attn.attention": "num_heads"},
    ),
    "opt": TensorPlan(
        styles={
            "model.decoder.embed_tokens": "embedding_rowwise",
            "model.decoder.layers.*.self_attn.q_proj": "colwise",
            "model.decoder.layers.*.self_attn.k_proj": "colwise",
            "model.decoder.layers.*.self_attn.v_proj": "colwise",
            "model.decoder.layers.*.self_attn.out_proj": "rowwise",
            "model.decoder.layers.*.fc1": "colwise",
            "model.decoder.layers.*.fc2": "rowwise",
            "lm_head": "colwise_gather_output",
        },
        divided_attributes={"model.decoder.layers.*.self_attn": "num_heads"},
    ),
}


@dataclass(frozen=True, kw_only=True)
class SequencePlan:
    """Where the residual stream of a model is sharded by sequence.

    Attributes:
        start: The first module that computes on each rank's tokens.
        norms: The norms before the layers; `*` stands for the number of a layer.
        last_norm: The norm after the last layer.
    """

    start: str
    norms: tuple[str, ...]
    last_norm: str


_LLAMA = SequencePlan(
    start="model.layers.0",
    norms=("model.layers.*.input_layernorm", "model.layers.*.post_attention_layernorm"),
    last_norm="model.norm",
)
_SEQUENCE_PLANS = {
    "gpt2": SequencePlan(
        start="transformer.drop",  # of the embeddings
        norms=("transformer.h.*.ln_1", "transformer.h.*.ln_2"),
        last_norm="transformer.ln_f",
    ),
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3"), _LLAMA),
}


def check_tensor_parallel(config: PreTrainedConfig, num_ranks: int) -> None:
    """Refuse an architecture with layers that cannot be sharded over a number of ranks.

    Args:
        config: The model's configuration.
        num_ranks: Number of ranks that compute each layer together.

    Raises:
        ConfigError: It has no exact plan, or its heads are not divisible.
    """
    if num_ranks == 1:
        return
    text_config = config.get_text_config()
    model_type = config.model_type
    if model_type not in _TENSOR_PLANS and not _has_library_plan(type(text_config)):
        raise ConfigError(
            f"--tensor_parallel_size {num_ranks} needs a plan of how to divide {model_type}, and "
            f"none exists; divide its weights with --data_parallel_shard_size {num_ranks}, or "
            f"choose one of {', '.join(list_planned_model_types())}."
        )
    _check_head_counts(model_type, text_config, num_ranks)
    vocab_size = text_config.vocab_size
    if -(-vocab_size // num_ranks) * (num_ranks - 1) >= vocab_size:
        raise ConfigError(
            f"--tensor_parallel_size {num_ranks} leaves a rank without a row of the {vocab_size} "
            "of the vocabulary; make it smaller."
        )


def _check_head_counts(model_type: str, text_config: PreTrainedConfig, num_ranks: int) -> None:
    """Refuse attention heads that the plan divides over ranks, and that these do not divide."""
    for name in ("num_attention_heads", "num_key_value_heads"):
        num_heads = getattr(text_config, name, None)
        is_divisible = num_heads is None or num_heads % num_ranks == 0
        if not is_divisible and _divides_heads(model_type, text_config):
            raise ConfigError(
                f"--tensor_parallel_size {num_ranks} does not divide the {num_heads} {name} of "
                f"{model_type}; choose a size that does, and --data_parallel_shard_size for the "
                "rest."
            )


def check_sequence_parallel(config: PreTrainedConfig) -> None:
    """Refuse an architecture with a residual stream that nobody has sharded.

    Raises:
        ConfigError: Names the architectures to choose from.
    """
    if config.model_type not in _SEQUENCE_PLANS:
        raise ConfigError(
            f"--sequence_parallel is for {', '.join(sorted(_SEQUENCE_PLANS))}, and this model is "
            f"{config.model_type}; leave it out."
        )


def sequence_plan(model: PreTrainedModel) -> SequencePlan:
    """Return where a model that `check_sequence_parallel` accepts is sharded, by module names."""
    plan = _SEQUENCE_PLANS[model.config.model_type]
    return replace(plan, norms=tuple(_match_modules(model, dict.fromkeys(plan.norms, ""))))


def list_planned_model_types() -> list[str]:
    """Return the model types of causal language models that have a plan."""
    config_classes = {
        model_type: CONFIG_MAPPING[model_type]
        for model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
        if model_type in CONFIG_MAPPING
    }
    library_types = {
        model_type
        for model_type, config_class in config_classes.items()
        if _has_library_plan(config_class.sub_configs.get("text_config", config_class))
    }
    return sorted(library_types | _TENSOR_PLANS.keys())


def make_tensor_plan(model: PreTrainedModel) -> TensorPlan:
    """Return the plan of a model, by the names of its modules.

    Args:
        model: A causal language model that `check_tensor_parallel` accepts.

    Raises:
        ConfigError: The plan leaves out a weight that would get the gradient of some heads only.
    """
    llm_plan = _TENSOR_PLANS.get(model.config.model_type)
    if llm_plan is not None:
        return TensorPlan(
            styles=_match_modules(model, llm_plan.styles),
            divided_attributes=_match_modules(model, llm_plan.divided_attributes),
        )
    styles = _match_modules(model, _read_library_styles(model))
    _check_partial_gradients(model, styles)
    return TensorPlan(styles=styles)


def _check_partial_gradients(model: PreTrainedModel, styles: Mapping[str, str]) -> None:
    """Refuse a plan with a whole weight next to divided columns, such as a norm of the queries.

    Each rank would apply it to its columns alone, so that its gradient would be partial.
    """
    column_parents = {
        name.rpartition(".")[0] for name, style in styles.items() if style == "colwise"
    }
    for name, parameter in model.named_parameters():
        module_name = name.rpartition(".")[0]
        parent_name = module_name.rpartition(".")[0]
        is_undivided = parameter.requires_grad and module_name not in styles
        if is_undivided and {module_name, parent_name} & column_parents:
            raise ConfigError(
                f"--tensor_parallel_size does not go with {model.config.model_type}: its plan "
                f"divides what lies around {name}, but not that; use --data_parallel_shard_size."
            )


def _read_library_styles(model: PreTrainedModel) -> dict[str, str]:
    """Return the styles of transformers' plan, by names of modules or patterns of them."""
    styles = dict(model.tp_plan or {})
    head = model.get_output_embeddings()
    embedding = model.get_input_embeddings()
    name_by_module = {module: name for name, module in model.named_modules()}
    # A tied head and its embedding must be sharded in the same way.
    if head is not None and name_by_module[head] in styles and isinstance(embedding, nn.Embedding):
        styles[name_by_module[embedding]] = "embedding_rowwise"
    return styles


def _match_modules(model: nn.Module, patterns: Mapping[str, str]) -> dict[str, str]:
    """Return the value of each pattern by the names of the modules that match it."""
    return {
        name: patterns[pattern]
        for name, _ in model.named_modules()
        if (pattern := re.sub(r"\.\d+(?=\.|$)", ".*", name)) in patterns
    }


def _has_library_plan(config_class: type[PreTrainedConfig]) -> bool:
    """Return whether transformers has a plan with contiguous shards only."""
    plan = getattr(config_class, "base_model_tp_plan", None) or {}
    return bool(plan) and STYLES.issuperset(plan.values())


def _divides_heads(model_type: str, config: PreTrainedConfig) -> bool:
    """Return whether a plan divides the attention heads over ranks."""
    styles = getattr(config, "base_model_tp_plan", None) or {}
    return model_type in _TENSOR_PLANS or any(
        style == "colwise" and "att" in name.split(".")[-2] for name, style in styles.items()
    )
