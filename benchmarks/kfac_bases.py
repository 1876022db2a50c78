"""How diagonal the second moment of a gradient is in the bases of K-FAC, SOAP and others.

An optimizer that divides each entry of a rotated gradient by its root mean square ignores how
entries correlate. So a basis is judged by the share of E[vec(g) vec(g)^T] that is on the diagonal
in it. This needs no training in the basis: a model is trained by SOAP for a while, bases are made
of some batches' gradients and tokens, and judged by those of others.
"""

from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.kfac_run import Training, model_of, text_of
from llm.models.loss import LanguageModelLoss

_STEPS = 200
_BATCHES = 128
"""Batches of which bases are made; as many judge them."""
_TOKENS_KEPT = 8192
"""Tokens for the fits of factors by maximum likelihood."""

Shares = dict[str, dict[str, float]]
"""The share on the diagonal by row, such as "attention, 2,048 tokens a step", and by basis."""


def diagonal_shares(settings: dict[str, Any]) -> Shares:
    """Return means over the layers of attention and of the MLP, at one and four batches a step."""
    text = text_of(settings)
    model = model_of(settings, text.vocab_size)
    batches = text.batches(settings["seed"])
    training = Training(settings | {"method": "soap"}, model)
    for inputs, labels in islice(batches, _STEPS):
        training.step(inputs, labels, learning_rate=settings["learning_rate"])
    layers = {
        name: layer
        for name, layer in model.named_modules()
        if isinstance(layer, nn.Linear) and name != "lm_head"
    }
    made_of = {name: _Statistics() for name in layers}
    judging = {name: _Statistics() for name in layers}
    record(model, layers, made_of, islice(batches, _BATCHES))
    record(model, layers, judging, islice(batches, _BATCHES))

    found: dict[str, dict[str, list[float]]] = {}
    tokens = settings["batch_size"] * settings["block_size"]
    for name in layers:
        part = "attention" if "attn" in name else "MLP"
        bases = bases_of(made_of[name])
        for number in (1, 4):
            gradients = torch.stack(judging[name].gradients).unflatten(0, (-1, number)).mean(1)
            row = found.setdefault(f"{part}, {number * tokens:,} tokens a step", {})
            for basis, (left, right) in bases.items():
                share = diagonal_share(left.T @ gradients @ right)
                row.setdefault(basis, []).append(share)
    return {
        row: {basis: sum(its) / len(its) for basis, its in bases.items()}
        for row, bases in found.items()
    }


class _Statistics:
    """What a layer's bases are made of.

    Attributes:
        gradients: Of each batch, [rows, columns].
        inputs: E[a a^T] over tokens.
        outputs: E[g g^T] over tokens.
        tokens: Some tokens' a and g.
    """

    def __init__(self) -> None:
        self.gradients: list[Tensor] = []
        self.inputs = self.outputs = torch.zeros(())
        self.tokens: list[tuple[Tensor, Tensor]] = []

    def add(self, gradient: Tensor, a: Tensor, g: Tensor) -> None:
        """Add a batch: the weight's gradient, and of its tokens inputs and output gradients."""
        self.gradients.append(gradient)
        self.inputs, self.outputs = self.inputs + a.T @ a, self.outputs + g.T @ g
        every = -(-_BATCHES * len(a) // _TOKENS_KEPT)
        self.tokens.append((a[::every].clone(), g[::every].clone()))


def record(
    model: nn.Module,
    layers: dict[str, nn.Linear],
    statistics: dict[str, _Statistics],
    batches: Iterable[tuple[Tensor, Tensor]],
) -> None:
    """Add the gradients and tokens of some batches, in float32, to the layers' statistics.

    Statistics are on the host, wherever the model is.
    """
    inputs: dict[str, Tensor] = {}
    outputs: dict[str, Tensor] = {}

    def keep(kept: dict[str, Tensor], name: str, index: int) -> Callable[..., None]:
        def hook(_: nn.Module, *tensors: Any) -> None:
            kept[name] = tensors[index][0].detach().flatten(0, 1).cpu()

        return hook

    handles = [
        handle
        for name, layer in layers.items()
        for handle in (
            layer.register_forward_pre_hook(keep(inputs, name, 0)),
            layer.register_full_backward_hook(keep(outputs, name, 1)),
        )
    ]
    loss = LanguageModelLoss(model)
    for ids, labels in batches:
        model.zero_grad()
        objective, _ = loss(ids, labels)
        objective.backward()
        for name, layer in layers.items():
            assert layer.weight.grad is not None
            gradient = layer.weight.grad.cpu() / ids.numel()
            statistics[name].add(gradient, inputs[name], outputs[name])
    for handle in handles:
        handle.remove()


def bases_of(statistics: _Statistics) -> dict[str, tuple[Tensor, Tensor]]:
    """Return the eigenvectors for rows and columns by the name of the optimizer or factors."""
    gradients = torch.stack(statistics.gradients)
    rows, columns = gradients.shape[1:]
    of_rows = _eigenvectors((gradients @ gradients.mT).sum(0))
    of_columns = _eigenvectors((gradients.mT @ gradients).sum(0))
    kfac = _eigenvectors(statistics.outputs), _eigenvectors(statistics.inputs)
    likely_outputs, likely_inputs = likely_factors(statistics.tokens)
    left, _, right = torch.linalg.svd(gradients.mean(0))
    wide_rows, wide_columns = rows > columns, columns > rows
    return {
        "none (AdamW)": (torch.eye(rows), torch.eye(columns)),
        "K-FAC": kfac,
        "K-FAC, maximum likelihood": (_eigenvectors(likely_outputs), _eigenvectors(likely_inputs)),
        "K-FAC, identity on a wide side": (
            torch.eye(rows) if wide_rows else kfac[0],
            torch.eye(columns) if wide_columns else kfac[1],
        ),
        "K-FAC's inputs, SOAP's rows": (of_rows, kfac[1]),
        "K-FAC's outputs, SOAP's columns": (kfac[0], of_columns),
        "SOAP": (of_rows, of_columns),
        "singular vectors of the mean gradient": (left, right.T),
    }


def likely_factors(tokens: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Return G and A of the Kronecker product that makes the tokens' gradients most likely.

    Each is the mean over tokens of g g^T or a a^T, weighted by a^T A^-1 a or g^T G^-1 g, in turns
    (the "flip-flop" of Dutilleul 1999). Both have a trace of 1, and a ridge of 1e-4 of its mean.
    """
    a, g = (torch.cat(its) for its in zip(*tokens, strict=True))
    inputs, outputs = _normalized(a.T @ a), _normalized(g.T @ g)
    for _ in range(5):
        inputs = _normalized((a.T * torch.linalg.vecdot(torch.linalg.solve(outputs, g.T).T, g)) @ a)
        outputs = _normalized((g.T * torch.linalg.vecdot(torch.linalg.solve(inputs, a.T).T, a)) @ g)
    return outputs, inputs


def _normalized(factor: Tensor) -> Tensor:
    return factor / factor.trace() + 1e-4 / len(factor) * torch.eye(len(factor))


def _eigenvectors(matrix: Tensor) -> Tensor:
    # In double precision, since an average of few gradients has no full rank.
    vectors: Tensor = torch.linalg.eigh(matrix.double())[1]
    return vectors.float()


def diagonal_share(rotated: Tensor) -> float:
    """Return the share of the second moment of matrices that is on its diagonal.

    The squared Frobenius norms of E[vec(g) vec(g)^T] and of its diagonal are means over pairs of
    different samples, so that few samples do not bias them.

    Args:
        rotated: [samples, rows, columns].
    """
    flat = rotated.flatten(1)
    products, squares = flat @ flat.T, flat.square()
    pairs = products.square().sum() - products.diagonal().square().sum()
    return float((squares.sum(0).square().sum() - squares.square().sum()) / pairs)
