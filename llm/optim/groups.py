"""Parameter groups: decay, learning-rate factors, embeddings and head."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from llm.optim.options import OptimizerOptions, embedding_rate_factor


def has_weight_decay(name: str, parameter: torch.nn.Parameter) -> bool:
    """Return whether weight decay applies to a parameter: to matrices, including embeddings.

    A matrix is a `weight` of two or more dimensions, or a stack of matrices such as fused experts.
    Gains and biases do not count, and neither do parameters that only look like matrices: Mamba's
    state matrix `A_log`, a stack of experts' biases.
    """
    if name.rpartition(".")[2] == "weight":
        return parameter.ndim >= 2
    return parameter.ndim >= 3 and min(parameter.shape) > 1


def parameter_groups(options: OptimizerOptions, model: torch.nn.Module) -> list[dict[str, Any]]:
    """Group the trained parameters of a model by weight decay and by learning rate.

    A tied parameter counts once; empty groups are left out. Embeddings, output head, gains and
    biases may have a separate rate: the schedule's rate times a fixed `rate_factor`.

    Args:
        options: The weight decay and both learning rates.
        model: The model, or this rank's stages.
    """
    param_by_name = {name: param for name, param in model.named_parameters() if param.requires_grad}
    decayed_params = {
        param for name, param in param_by_name.items() if has_weight_decay(name, param)
    }
    groups = split_groups(
        [{"params": [*param_by_name.values()]}],
        decayed_params,
        chosen_settings={"weight_decay": options.weight_decay},
        other_settings={"weight_decay": 0.0},
    )
    embedding_rate = embedding_settings(options)
    if not embedding_rate:
        return groups
    return split_groups(
        groups, set(inner_matrices(model)), chosen_settings={}, other_settings=embedding_rate
    )


def embedding_settings(options: OptimizerOptions) -> dict[str, Any]:
    """Return the settings of a group with the rate of the embeddings; empty without such a rate."""
    rate_factor = embedding_rate_factor(options)
    if rate_factor is None:
        return {}
    return {"lr": options.embedding_learning_rate, "rate_factor": rate_factor}


def split_groups(
    groups: Iterable[dict[str, Any]],
    chosen_params: set[torch.nn.Parameter],
    chosen_settings: dict[str, Any] | None,
    other_settings: dict[str, Any] | None,
) -> list[dict[str, Any]]:
    """Split each group into the chosen parameters and the others; an empty group is left out.

    Args:
        groups: Parameter groups; not changed.
        chosen_params: Parameters of any group.
        chosen_settings: Settings to add for the chosen parameters; None leaves these out.
        other_settings: Settings to add for the others; None leaves these out.
    """
    subgroups: list[dict[str, Any]] = []
    for group in groups:
        group_chosen = [param for param in group["params"] if param in chosen_params]
        group_others = [param for param in group["params"] if param not in chosen_params]
        for params, settings in ((group_chosen, chosen_settings), (group_others, other_settings)):
            if params and settings is not None:
                subgroups.append(group | {"params": params} | settings)
    return subgroups


def scale_learning_rates(
    optimizer: torch.optim.Optimizer,
    model: torch.nn.Module,
    choose_factor: Callable[[str, int, Mapping[str, Any]], float],
) -> None:
    """Multiply parameters' learning rates by a factor, stored in their groups.

    Weight decay takes the same fraction of a weight in each step, regardless of the factor: the
    group's decay is divided by it, because AdamW and Muon multiply the decay by the learning rate.

    Args:
        optimizer: Its groups are split by factor, in place; at factor 1 they do not change.
        model: The model with the parameters of the groups.
        choose_factor: Returns the factor of a parameter from its name in the model, its number of
            dimensions, and the settings of its group.
    """
    name_by_param = {param: name for name, param in model.named_parameters()}
    scaled_groups: list[dict[str, Any]] = []
    for group in optimizer.param_groups:
        param_indices_by_factor: dict[float, list[int]] = {}
        for param_index, param in enumerate(group["params"]):
            factor = choose_factor(name_by_param[param], param.ndim, group)
            param_indices_by_factor.setdefault(factor, []).append(param_index)
        for factor, param_indices in param_indices_by_factor.items():
            scaled_groups.append(_scale_subgroup(group, param_indices, factor))
    optimizer.param_groups = scaled_groups


def _scale_subgroup(
    group: Mapping[str, Any], param_indices: Sequence[int], factor: float
) -> dict[str, Any]:
    """Return a group of some of the parameters, with their learning rate times a factor."""
    subgroup = {
        **group,
        "lr": group["lr"] * factor,
        "weight_decay": group["weight_decay"] / factor,
        "rate_factor": factor * group.get("rate_factor", 1.0),
    }
    for list_name in ("params", "keys"):  # BF16AdamW also has a key for each parameter
        if list_name in group:
            subgroup[list_name] = [group[list_name][index] for index in param_indices]
    return subgroup


def output_head(model: torch.nn.Module) -> torch.nn.Module | None:
    """Return the layer that computes the logits, if a transformers model has one."""
    get_head = getattr(model, "get_output_embeddings", None)
    head: torch.nn.Module | None = get_head() if callable(get_head) else None
    return head


def embeddings_and_head(model: torch.nn.Module) -> set[torch.nn.Parameter]:
    """Return the matrices with a row for each token or position, [tokens, width]."""
    modules = [module for module in model.modules() if isinstance(module, torch.nn.Embedding)]
    # A pipeline stage without the head holds a placeholder for it, without a weight.
    candidates = [getattr(module, "weight", None) for module in (*modules, output_head(model))]
    return {weight for weight in candidates if isinstance(weight, torch.nn.Parameter)}


def inner_matrices(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    """Return the trained matrices and stacks, except embeddings and the output head."""
    excluded_params = embeddings_and_head(model)
    return [
        param
        for name, param in model.named_parameters()
        if param.requires_grad and has_weight_decay(name, param) and param not in excluded_params
    ]
