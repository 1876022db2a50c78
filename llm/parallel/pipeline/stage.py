"""A model cut into stages for pipeline parallelism, without a change to its code or its names.

A stage is the whole Hugging Face model in which a stand-in takes the place of every module that
another stage holds. Stand-ins before the stage's own layers give what the stage before has sent,
whatever they are asked; the one right behind them keeps what goes out. So masks and positions are
the model's own business on every stage, and a parameter is called as in the whole model.
"""

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from llm.errors import ConfigError
from llm.models.configuration import one_line
from llm.models.loss import LanguageModelLoss
from llm.models.masking import run_model
from llm.parallel.pipeline.split import (
    PipelineModules,
    cannot_cut,
    find_pipeline_modules,
    num_parameters,
    some_tokens,
)


class _StageIO:
    """Where a stage's stand-ins find what came in and leave what goes out."""

    received: Tensor | None = None
    sent: Tensor | None = None


class _StagePlaceholder(nn.Module):
    """Takes the place of a module that another stage holds.

    Args:
        original: Whose plain attributes it has too: models ask their layers for some.
        wire: Of the stage.
        place: Whether it comes before the stage's own layers, right behind them, or later.
        length: How many values it returns in a tuple; 0 for a bare tensor.
    """

    def __init__(
        self,
        original: nn.Module,
        wire: _StageIO,
        place: Literal["before", "next", "later"],
        length: int = 0,
    ) -> None:
        super().__init__()
        # A divided layer has a `forward` among them, which would go on to compute the layer.
        plain = {key: value for key, value in vars(original).items() if not key.startswith("_")}
        vars(self).update({key: value for key, value in plain.items() if key != "forward"})
        self._wire, self._place, self._length = wire, place, length

    def forward(self, *args: object, **kwargs: object) -> object:
        """What came in, or else the argument."""
        value = args[0] if args else kwargs.get("hidden_states")
        if self._place == "before":
            value = self._wire.received
        elif self._place == "next":
            assert isinstance(value, Tensor)
            self._wire.sent = value
        return (value, *[None] * (self._length - 1)) if self._length else value


class Stage(nn.Module):
    """Some layers of a model, with the embeddings if it is the first and the loss if the last.

    Args:
        loss: The whole model's loss, with stand-ins in the model.
        wire: What its stand-ins read and write.
        is_last: Whether it has the output head.
    """

    def __init__(self, loss: nn.Module, wire: _StageIO, *, is_last: bool) -> None:
        super().__init__()
        self.loss = loss
        self.is_last = is_last
        self._wire = wire

    def forward(
        self,
        received: Tensor,
        *,
        input_ids: Tensor,
        labels: Tensor | None = None,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Run the stage's layers.

        Args:
            received: [batch, length, width]: what the stage before has sent; the first stage
                takes no notice of it.
            input_ids: As for the loss; every stage has them.
            labels: As for the loss; without them the last stage predicts.
            positions: As for the loss.
            documents: As for the loss.

        Returns:
            [batch, length, width] for the next stage; of the last stage what the loss returns,
            or its predictions.
        """
        wire, loss = self._wire, self.loss
        assert isinstance(loss, LanguageModelLoss)
        wire.received, wire.sent = received, None
        try:
            if not self.is_last:
                run_model(loss.model.base_model, input_ids, positions, documents)
                assert wire.sent is not None
                return wire.sent
            if labels is None:
                return loss.predictions(input_ids, positions, documents)
            outputs: tuple[Tensor, Tensor] = loss(input_ids, labels, positions, documents)
            return outputs
        finally:
            wire.received = wire.sent = None


@dataclass(frozen=True)
class Cut:
    """A rank's share of a model that was cut into stages.

    Attributes:
        stages: This rank's stages, from the first to the last.
        part: The model with stand-ins for all that this rank does not hold: names and weights.
        tied: Names in `part` of parameters that the first and the last stage both hold.
        width: Of the hidden states between two stages.
        layers: Of each stage of the pipeline.
        parameters: How many each stage of the pipeline holds.
    """

    stages: list[Stage]
    part: nn.Module
    tied: frozenset[str]
    width: int
    layers: list[range]
    parameters: list[int]


def check_depth(num_layers: int, num_stages: int) -> None:
    """Refuse more stages than layers.

    Raises:
        ConfigError: With both numbers.
    """
    if num_layers < num_stages:
        raise ConfigError(
            f"--pipeline_parallel_size (times --virtual_stages) is {num_stages} stages, and the "
            f"model has {num_layers} layer{'s' if num_layers > 1 else ''} to put into them; make "
            "it smaller."
        )


def cut_model(
    pieces: PipelineModules, loss: LanguageModelLoss, num_stages: int, own: Sequence[int]
) -> Cut:
    """Cut a model into stages that take about as long as one another.

    Args:
        pieces: Of the model, as they were before its layers were divided.
        loss: A model that `check_cut` lets pass, inside its loss; both stay as they are, and
            share their modules with the stages.
        num_stages: Of the whole pipeline.
        own: The numbers of this rank's stages.
    """
    model = loss.model
    layers = pieces.assign_layers(num_stages)
    made = [_make_stage(loss, pieces, layers[number]) for number in own]
    part = _replace(model, _missing([stand_ins for _, stand_ins in made]))
    ends = [_parameters(pieces.of(layers[number])) for number in (0, -1)]
    return Cut(
        stages=[stage for stage, _ in made],
        part=part,
        tied=frozenset(n for n, p in part.named_parameters() if all(p in end for end in ends)),
        width=model.config.get_text_config().hidden_size,
        layers=layers,
        parameters=[num_parameters(pieces.of(share)) for share in layers],
    )


@torch.no_grad()
def check_cut(model: PreTrainedModel, num_stages: int) -> None:
    """Refuse a model whose stages, each by itself, would not compute what the whole does.

    They are asked by what they do to a few tokens, from the last to the first and after other
    tokens: what layers tell one another behind their outputs is wrong then.

    Args:
        model: A causal language model with weights, which may be made up; its mode is restored.
        num_stages: Of the whole pipeline.

    Raises:
        ConfigError: They compute something else, or nothing; or the model has fewer layers.
    """
    if getattr(model.config.get_text_config(), "output_router_logits", False):
        raise cannot_cut(
            model, "with output_router_logits its loss needs the routers of all layers"
        )
    pieces = find_pipeline_modules(model)
    check_depth(len(pieces.layers), num_stages)
    loss = LanguageModelLoss(model, chunked=False)
    input_ids = some_tokens(model)
    training = model.training
    model.eval()
    try:
        stages = [_make_stage(loss, pieces, share)[0] for share in pieces.assign_layers(num_stages)]
        passed: list[Any] = [input_ids]
        for stage in stages:
            passed.append(stage(passed[-1], input_ids=input_ids, labels=input_ids))
        passed[-1] = loss(input_ids, input_ids)
        loss(input_ids.flip(1), input_ids)
        for number in reversed(range(num_stages)):
            alone = stages[number](passed[number], input_ids=input_ids, labels=input_ids)
            if not _alike(alone, passed[number + 1]):
                raise ValueError("its layers tell one another more than their outputs")
    except Exception as error:
        raise cannot_cut(model, one_line(error)) from error
    finally:
        model.train(training)


def _alike(one: Tensor | tuple[Tensor, ...], other: Tensor | tuple[Tensor, ...]) -> bool:
    """Whether hidden states, or the sums of losses, are equal but for rounding."""
    mine, theirs = (value if isinstance(value, Tensor) else value[-1] for value in (one, other))
    return torch.allclose(mine, theirs, rtol=1e-5, atol=1e-5 * float(theirs.abs().max()))


_StagePlaceholders = dict[nn.Module, nn.Module]


def _make_stage(
    loss: LanguageModelLoss, pieces: PipelineModules, share: range
) -> tuple[Stage, _StagePlaceholders]:
    """A stage with these layers, and what takes the place of the modules that it lacks."""
    wire = _StageIO()
    lengths = dict(zip(pieces.layers, pieces.lengths, strict=True))
    own = pieces.of(share)
    kept = _parameters(own)
    stand_ins: _StagePlaceholders = {}
    place: Literal["before", "next", "later"] = "before"
    for module in pieces.of(range(len(pieces.layers))):
        if module in own:
            place = "next"
            continue
        stand_in = _StagePlaceholder(module, wire, place, lengths.get(module, 0))
        for name, parameter in module.named_parameters(recurse=False):
            if parameter in kept:  # a tied one keeps the name that it has in the whole model
                stand_in.register_parameter(name, parameter)
        stand_ins[module] = stand_in
        place = "later" if place == "next" else place
    is_last = share.stop == len(pieces.layers)
    view = _replace(loss, dict(stand_ins))
    return Stage(view, wire, is_last=is_last), stand_ins


def _missing(stand_ins: Sequence[_StagePlaceholders]) -> _StagePlaceholders:
    """What no stage of a rank holds: of its stand-ins those that have a parameter, if any."""
    missing: _StagePlaceholders = {}
    for module in stand_ins[0]:
        if all(module in others for others in stand_ins):
            candidates = [others[module] for others in stand_ins]
            with_parameters = [c for c in candidates if any(True for _ in c.parameters())]
            missing[module] = (with_parameters or candidates)[0]
    return missing


def _replace(module: nn.Module, by: dict[nn.Module, nn.Module]) -> nn.Module:
    """A module with others in the place of some inside it; what is left is shared, not copied."""
    if module in by:
        return by[module]
    children = {name: _replace(child, by) for name, child in module.named_children()}
    if all(children[name] is child for name, child in module.named_children()):
        return module
    view = copy.copy(module)
    vars(view)["_modules"] = {**module._modules, **children}
    by[module] = view
    return view


def _parameters(modules: Iterable[nn.Module]) -> set[nn.Parameter]:
    return {parameter for module in modules for parameter in module.parameters()}
