"""The stages of a model for pipeline parallelism, without a change to its code or its names.

A stage is the whole Hugging Face model, with placeholders for the modules of other stages.
Placeholders before the stage's layers return the received hidden states; the one right after them
keeps the hidden states to send. So every stage computes masks and positions with the model's code,
and parameters have the same names as in the whole model.
"""

import contextlib
import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from llm.errors import ConfigError, one_line
from llm.models.attention import evaluation_mode, random_tokens, run_model
from llm.models.loss import LanguageModelLoss
from llm.parallel.pipeline.split import (
    SAMPLE_SHAPE,
    PipelineModules,
    cut_error,
    find_pipeline_modules,
    num_parameters,
)
from llm.runtime.float32 import full_float32


class _StageIO:
    """The hidden states that a stage's placeholders read and write during a forward."""

    received: Tensor | None = None
    output: Tensor | None = None


class _StagePlaceholder(nn.Module):
    """Replaces a module that another stage holds.

    Args:
        original: The module. Its plain attributes are copied: models read some of their layers.
        io: Inputs and outputs of the stage's placeholders.
        place: Whether it comes before the stage's layers, right after them, or later.
        tuple_length: Length of the tuple that it returns; 0 for a bare tensor.
    """

    def __init__(
        self,
        original: nn.Module,
        io: _StageIO,
        place: Literal["before", "next", "later"],
        tuple_length: int = 0,
    ) -> None:
        super().__init__()
        public_attributes = {
            name: value for name, value in vars(original).items() if not name.startswith("_")
        }
        # Tensor parallelism sets a `forward`, which would compute the layer.
        public_attributes.pop("forward", None)
        vars(self).update(public_attributes)
        self._io, self._place, self._tuple_length = io, place, tuple_length

    def forward(self, *args: object, **kwargs: object) -> object:
        """Return the received hidden states before the stage's layers, else the argument."""
        value = args[0] if args else kwargs.get("hidden_states")
        if self._place == "before":
            value = self._io.received
        elif self._place == "next":
            assert isinstance(value, Tensor)
            self._io.output = value
        return (value, *[None] * (self._tuple_length - 1)) if self._tuple_length else value


class PipelineStage(nn.Module):
    """Some layers of a model, with the embeddings if it is the first and the loss if the last.

    Args:
        loss: The whole model's loss, with placeholders in the model.
        io: Inputs and outputs of the placeholders.
        is_last: Whether it has the output head.

    Attributes:
        autocast: Returns the context of the run's precision; none by default.
        sent_dtype: Type of hidden states and their gradients between stages.
    """

    def __init__(self, loss: nn.Module, io: _StageIO, *, is_last: bool) -> None:
        super().__init__()
        self.loss: Any = loss
        self.is_last = is_last
        self.autocast: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
        self.sent_dtype = torch.float32
        self._io = io

    def forward(
        self,
        received: Tensor,
        *,
        input_ids: Tensor,
        labels: Tensor,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
        sources: Tensor | None = None,
        predicting: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Run the stage's layers.

        Args:
            received: Hidden states [batch, length, width] of the stage before, of `sent_dtype`; the
                first stage ignores it.
            input_ids: Token ids, [batch, length]; this and what follows as for `MicroBatch`.
            labels: Ids of the next tokens, for the last stage.
            positions: Position of each token in its sample or document.
            documents: Document of each token.
            sources: Source of each sample, for the last stage.
            predicting: Whether the last stage predicts instead of computing the loss.

        Returns:
            [batch, length, width] of `sent_dtype` for the next stage; of the last stage what the
            loss returns, or its predictions.
        """
        io, loss = self._io, self.loss
        assert isinstance(loss, LanguageModelLoss)
        # Layers add to their input, which stays float32 in autocast.
        io.received, io.output = received.float(), None
        try:
            with self.autocast():
                if self.is_last:
                    outputs: tuple[Tensor, Tensor]
                    if predicting:
                        outputs = loss.predict_tokens(input_ids, labels, positions, documents)
                    else:
                        outputs = loss(input_ids, labels, positions, documents, sources)
                    return outputs
                run_model(loss.model.base_model, input_ids, positions, documents)
            assert io.output is not None
            return io.output.to(self.sent_dtype).contiguous()  # as the next stage's receive buffer
        finally:
            io.received = io.output = None


@dataclass(frozen=True)
class LocalStages:
    """A rank's stages of a model.

    Attributes:
        stages: This rank's stages, from the first to the last.
        model: The model with placeholders for other ranks' modules: names and weights.
        tied: Names in `model` of parameters that the first and the last stage both hold.
        width: Width of the hidden states between two stages.
        layers: The layers of each stage of the pipeline.
        num_parameters: The number of parameters of each stage of the pipeline.
    """

    stages: list[PipelineStage]
    model: nn.Module
    tied: frozenset[str]
    width: int
    layers: list[range]
    num_parameters: list[int]


def check_num_stages(num_layers: int, num_stages: int) -> None:
    """Refuse more stages than layers.

    Raises:
        ConfigError: The message has both numbers.
    """
    if num_layers < num_stages:
        raise ConfigError(
            f"--pipeline_parallel_size (times --virtual_stages) is {num_stages} stages, and the "
            f"model has {num_layers} layer{'s' if num_layers > 1 else ''} to put into them; make "
            "it smaller."
        )


def cut_model(
    modules: PipelineModules, loss: LanguageModelLoss, num_stages: int, stage_indices: Sequence[int]
) -> LocalStages:
    """Cut a model into stages of about the same cost.

    Args:
        modules: The model's modules, found before tensor parallelism was applied.
        loss: A model that `check_cut` accepts, inside its loss. Both do not change, and share their
            modules with the stages.
        num_stages: Stages of the whole pipeline.
        stage_indices: The indices of this rank's stages in the pipeline.
    """
    model = loss.model
    layers = modules.assign_layers(num_stages)
    local_stages = (_make_stage(loss, modules, layers[index]) for index in stage_indices)
    stages, placeholders_by_stage = zip(*local_stages, strict=True)
    model_view = _replace_submodules(model, _choose_common_placeholders(placeholders_by_stage))
    first_parameters = _parameters_of(modules.of_stage(layers[0]))
    last_parameters = _parameters_of(modules.of_stage(layers[-1]))
    tied_parameters = first_parameters & last_parameters
    return LocalStages(
        stages=list(stages),
        model=model_view,
        tied=frozenset(
            name
            for name, parameter in model_view.named_parameters()
            if parameter in tied_parameters
        ),
        width=model.config.get_text_config().hidden_size,
        layers=layers,
        num_parameters=[num_parameters(modules.of_stage(stage_layers)) for stage_layers in layers],
    )


@torch.no_grad()
@full_float32()
def check_cut(model: PreTrainedModel, num_stages: int) -> None:
    """Refuse a model if its stages do not compute the same as the whole model.

    The test runs the stages on a few tokens, from the last to the first, after a forward of other
    tokens: the result is wrong if layers pass each other anything except their outputs.

    Args:
        model: A causal language model with weights, which may be dummies; its mode is restored.
        num_stages: Stages of the whole pipeline.

    Raises:
        ConfigError: They compute something else, or fail; or the model has fewer layers.
    """
    modules = find_pipeline_modules(model)
    check_num_stages(len(modules.layers), num_stages)
    loss = LanguageModelLoss(model, is_chunked=False)
    input_ids = random_tokens(model, *SAMPLE_SHAPE)
    try:
        with evaluation_mode(model):
            layers = modules.assign_layers(num_stages)
            stages = [_make_stage(loss, modules, stage_layers)[0] for stage_layers in layers]
            stage_inputs: list[Any] = [input_ids]
            for stage in stages:
                stage_inputs.append(stage(stage_inputs[-1], input_ids=input_ids, labels=input_ids))
            whole_model_output = loss(input_ids, input_ids)
            expected_outputs = [*stage_inputs[1:-1], whole_model_output]

            loss(input_ids.flip(1), input_ids)  # leaves other values behind in the layers
            for stage_index in reversed(range(num_stages)):
                stage, stage_input = stages[stage_index], stage_inputs[stage_index]
                output = stage(stage_input, input_ids=input_ids, labels=input_ids)
                if not _are_close(output, expected_outputs[stage_index]):
                    raise ValueError("its layers pass each other more than their outputs")
    except Exception as error:
        raise cut_error(model, one_line(error)) from error


def _are_close(actual: Tensor | tuple[Tensor, ...], expected: Tensor | tuple[Tensor, ...]) -> bool:
    """Return whether hidden states, or the last of a loss's outputs, are equal up to rounding."""
    actual_values, expected_values = (
        output if isinstance(output, Tensor) else output[-1] for output in (actual, expected)
    )
    tolerance = 1e-5 * float(expected_values.abs().max())
    return torch.allclose(actual_values, expected_values, rtol=1e-5, atol=tolerance)


_Placeholders = dict[nn.Module, nn.Module]
"""The placeholder of each module that a stage does not hold."""


def _make_stage(
    loss: LanguageModelLoss, modules: PipelineModules, layers: range
) -> tuple[PipelineStage, _Placeholders]:
    """Return the stage with these layers, and its placeholders for all other modules."""
    io = _StageIO()
    tuple_length_by_layer = dict(zip(modules.layers, modules.tuple_lengths, strict=True))
    stage_modules = modules.of_stage(layers)
    stage_parameters = _parameters_of(stage_modules)
    placeholders: _Placeholders = {}
    place: Literal["before", "next", "later"] = "before"
    for module in modules.of_stage(range(len(modules.layers))):
        if module in stage_modules:
            place = "next"
            continue
        placeholder = _StagePlaceholder(module, io, place, tuple_length_by_layer.get(module, 0))
        for name, parameter in module.named_parameters(recurse=False):
            if parameter in stage_parameters:  # a tied weight keeps both of its names
                placeholder.register_parameter(name, parameter)
        placeholders[module] = placeholder
        place = "later" if place == "next" else place
    is_last = layers.stop == len(modules.layers)
    loss_view = _replace_submodules(loss, dict(placeholders))
    return PipelineStage(loss_view, io, is_last=is_last), placeholders


def _choose_common_placeholders(placeholders_by_stage: Sequence[_Placeholders]) -> _Placeholders:
    """Return a placeholder for each module that no stage of a rank holds.

    If several stages have a placeholder, prefer one with a (tied) parameter.
    """
    common_placeholders: _Placeholders = {}
    for module in placeholders_by_stage[0]:
        if all(module in placeholders for placeholders in placeholders_by_stage):
            candidates = [placeholders[module] for placeholders in placeholders_by_stage]
            tied_candidates = [
                placeholder
                for placeholder in candidates
                if next(placeholder.parameters(), None) is not None
            ]
            common_placeholders[module] = (tied_candidates or candidates)[0]
    return common_placeholders


def _replace_submodules(module: nn.Module, replacements: dict[nn.Module, nn.Module]) -> nn.Module:
    """Return a module with some submodules replaced; the others are shared, not copied."""
    if module in replacements:
        return replacements[module]
    children = {
        name: _replace_submodules(child, replacements) for name, child in module.named_children()
    }
    if all(children[name] is child for name, child in module.named_children()):
        return module
    module_view = copy.copy(module)
    vars(module_view)["_modules"] = {**module._modules, **children}
    replacements[module] = module_view
    return module_view


def _parameters_of(modules: Iterable[nn.Module]) -> set[nn.Parameter]:
    return {parameter for module in modules for parameter in module.parameters()}
