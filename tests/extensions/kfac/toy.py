"""A small network of linear layers and what K-FAC should find in it."""

import torch
from torch import Tensor, nn

from llm.extensions.kfac.curvature import Curvature
from llm.extensions.kfac.ekfac import EKFAC
from llm.extensions.kfac.layers import find_covered_layers


class Toy(nn.Module):
    """Two layers over tokens of width 6; the loss is a sum over tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.second = nn.Linear(8, 5, bias=False)

    def forward(self, inputs: Tensor) -> Tensor:
        """Logits of [..., 6]."""
        logits: Tensor = self.second(torch.tanh(self.first(inputs)))
        return logits


def toy_model(seed: int = 0) -> Toy:
    torch.manual_seed(seed)
    return Toy()


def toy_batch(seed: int, *, sequences: int = 4, length: int = 3) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(sequences, length, 6, generator=generator)
    labels = torch.randint(5, (sequences, length), generator=generator)
    return inputs, labels


def loss_sum(model: nn.Module, inputs: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(
        model(inputs).flatten(0, 1), labels.flatten(), reduction="sum"
    )


def forward_backward(
    model: nn.Module,
    curvature: Curvature,
    inputs: Tensor,
    labels: Tensor,
    *,
    micro_batches: int = 1,
    loss_scale: float = 1.0,
) -> None:
    """One step's gradient of the mean loss, unscaled, and its statistics."""
    model.zero_grad()
    scale = loss_scale / labels.numel()
    weight = 1 / labels.numel()
    with curvature.capture_stats(token_weight=weight, loss_scale=loss_scale):
        for part in range(micro_batches):
            share = slice(part, None, micro_batches)
            (loss_sum(model, inputs[share].contiguous(), labels[share]) * scale).backward()
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad /= loss_scale


def toy_ekfac(model: nn.Module, **options: object) -> EKFAC:
    curvature = Curvature(find_covered_layers(model), **options)
    return EKFAC([{"params": list(model.parameters())}], curvature, lr=0.01, weight_decay=0.1)
