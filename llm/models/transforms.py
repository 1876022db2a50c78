"""Changes that an extension makes to a model from outside."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedConfig


class Transform:
    """A change to a model, its initial weights, and its learning rates; does nothing by default.

    The model's configuration does not change: it describes the exported model.
    """

    def change_initial_weights(self, model: nn.Module) -> None:
        """Change freshly drawn weights, or this rank's shards of them, in place."""

    def change_modules(self, model: nn.Module) -> None:
        """Change modules in place; the model may be on the meta device."""

    def rate_factor(self, name: str, ndim: int, group: Mapping[str, Any]) -> float:
        """Return the factor of a parameter's learning rate.

        Args:
            name: The parameter's name in the whole model.
            ndim: Number of dimensions of the parameter.
            group: The parameter group in the optimizer, with its settings.
        """
        return 1.0

    def export_weights(
        self, state_dict: Mapping[str, Tensor], config: PreTrainedConfig
    ) -> Mapping[str, Tensor]:
        """Return the weights of an unchanged model that computes the same.

        Args:
            state_dict: Every weight by its name in the model; not changed.
            config: The model's configuration.
        """
        return state_dict
