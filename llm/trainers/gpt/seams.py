"""The interface of extensions, and the functions with which the core calls them.

An extension is a folder of `llm/extensions/` with an `options.py`, which declares a subclass of
[Extension][llm.trainers.gpt.seams.Extension]; `llm/trainers/gpt/extensions.py` lists it. The core
calls extensions in the order of that list.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from llm.parallel.dims import parallel_dims
from llm.parallel.layout import Layout
from llm.trainers.gpt.config import CoreConfig

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

    from llm.checkpoint.format import Checkpoint
    from llm.data.loader import StepBatch, TrainLoader
    from llm.models.transforms import Transform
    from llm.optim.run_optimizer import Recipe
    from llm.parallel.base import AcceleratedStrategy
    from llm.parallel.dims import ParallelDims
    from llm.trainers.gpt.run_setup import RunSetup, TrainSetup


FetchDataset = Callable[[str, str, str | None], str]


@dataclass(frozen=True)
class Inputs:
    """The inputs of a run that are read before its data, and before process groups form.

    Attributes:
        start: The checkpoint that the run resumes, branches from, or evaluates.
        init_from: The checkpoint that provides the run's weights.
        model_config: The model's configuration.
        weights_from: The Hub name or folder of the pretrained weights.
        tokenizer: The tokenizer.
        dims: How the ranks divide one model and its data.
    """

    start: "Checkpoint | None"
    init_from: "Checkpoint | None"
    model_config: "PreTrainedConfig"
    weights_from: str | None
    tokenizer: "PreTrainedTokenizerBase"
    dims: "ParallelDims"


@dataclass(frozen=True)
class Running:
    """A prepared run or evaluation.

    Attributes:
        setup: Its inputs.
        strategy: The model and its optimizer, on any layout.
        model: The model for the log's description.
        keep_alive: Call this at least once every `timeout` seconds during long operations, on all
            ranks equally often. On a request to stop it raises `StopRequest`.
    """

    setup: "RunSetup"
    strategy: "AcceleratedStrategy"
    model: "PreTrainedModel"
    keep_alive: Callable[[], None]


@dataclass(frozen=True)
class Exported:
    """An export that replaces the last weights.

    Attributes:
        prefix: Prefix of its evaluation results, such as `ema_`.
        description: Description for the log.
        card: Description of the weights for the model card.
    """

    prefix: str
    description: str
    card: str


@dataclass(frozen=True)
class SavedWeights:
    """Weights in a part of checkpoints, which `python -m llm.checkpoints --export` can export.

    Attributes:
        part: Name of the part, and of the switch that asks for it.
        options: The class of options that declares the switch.
        description: Description of the weights, and the option that saves them.
        card: Description of the weights for the model card.
    """

    part: str
    options: type
    description: str
    card: str


@dataclass(frozen=True)
class Periodic:
    """The work of an extension every few steps, and after the last step.

    A resume catches up on work that was due at the checkpoint's step, if the stop left no time.

    Attributes:
        name: Unique name among extensions, also used in checkpoints.
        every: Steps between two calls; None for one after the last step.
        run: Takes the number of steps done, and returns values for `metrics.jsonl` and the trackers
            by name. Its time does not count as training.
    """

    name: str
    every: int | None
    run: Callable[[int], dict[str, float]]


class LoopExtension:
    """Takes part in training or in an evaluation; every rank calls every method.

    Attributes:
        part: Its name in checkpoints; None if it keeps no state.
        description: Description of its state, for the log.
        exported: Description of the weights of `exporting`; None if it changes nothing.
        periodic: Its work every few steps; None without any.
    """

    part: ClassVar[str | None] = None
    description: ClassVar[str] = ""
    exported: Exported | None = None
    periodic: Periodic | None = None

    def before_step(self, step: int) -> None:
        """Called before a training step.

        Args:
            step: Steps done.
        """

    def after_update(self, batch: "StepBatch") -> None:
        """Called after each optimizer step; must not read from the device."""

    def after_step(self, step: int) -> None:
        """Called after a training step, before logging; its time counts as training.

        Args:
            step: Steps done.
        """

    def after_steps(
        self, steps: "Sequence[tuple[int, bool, float]]", loader: "TrainLoader"
    ) -> None:
        """Called with the losses of steps over all ranks, once read from the device.

        Args:
            steps: For each step its number, whether it was skipped, and its mean loss.
            loader: The samples of the steps.

        Raises:
            DivergedError: Training must stop.
            RestartError: Training must go back to a checkpoint.
        """

    def between_steps(self) -> None:
        """Called between two steps; its time does not count as training."""

    def close(self) -> None:
        """Called after the last step of this start."""

    def evaluated(
        self, evaluate: Callable[[], dict[str, float]], *, is_final: bool
    ) -> dict[str, float]:
        """Return further results of an evaluation.

        Args:
            evaluate: Evaluates the model with its present weights.
            is_final: Whether this is the evaluation at the end of training.
        """
        return {}

    def task_results(self) -> dict[str, dict[str, float]]:
        """Return results of the trained model by task and metric, for its card.

        Called at the end of training, and of an evaluation without training.
        """
        return {}

    def exporting(self) -> contextlib.AbstractContextManager[None]:
        """Return a context that gives the model the weights to export."""
        return contextlib.nullcontext()

    def begin(self) -> None:
        """Initialize the part if a checkpoint does not have it."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state: plain values, and tensors by the names of the model's parameters."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the state; live tensors have already been overwritten."""


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class Extension(CoreConfig):
    """The options of an extension, and its methods; it imports its code where needed.

    Attributes:
        MEMORY_KINDS: Kinds of memory that the plan shows for its optimizer.
        fetch_options: Options that `python -m llm.fetch` takes too.
        saved_weights: Further weights in checkpoints.
    """

    MEMORY_KINDS: ClassVar[tuple[str, ...]] = ()
    fetch_options: ClassVar[type | None] = None
    saved_weights: ClassVar[SavedWeights | None] = None

    @property
    def listed(self) -> "Sequence[type[Extension]]":
        """The extensions in `extensions.py`, in their order."""
        return ()

    def extension_problems(self) -> list[str]:
        """Return the problems that the listed extensions find in the options."""
        return [problem for extension in self.listed for problem in extension.problems(self)]

    def problems(self) -> list[str]:
        """Return a sentence for each combination of its options, or with the core's, that fails."""
        return []

    def plan_problems(self) -> list[str]:
        """Return a sentence for each of its options that `llm.plan` cannot plan."""
        return []

    def needs_validation(self) -> list[str]:
        """Return its given options that ask for evaluations."""
        return []

    def read(self, inputs: Inputs) -> Any:
        """Check the inputs, and read further ones; `RunSetup.read_by` keeps the result.

        Raises:
            LLMError: The extension cannot work with these inputs.
        """

    def layout(
        self, *, ranks: int, ranks_per_node: int, start: "Checkpoint | None"
    ) -> Layout | None:
        """Return the layout that its options ask for; None to leave it to others.

        Args:
            ranks: Number of all ranks.
            ranks_per_node: Number of consecutive ranks on each node.
            start: The checkpoint that the run resumes, branches from, or evaluates.

        Raises:
            ConfigError: The layout does not allow this number of ranks.
        """
        return None

    def transform(self, model_config: "PreTrainedConfig") -> "Transform | None":
        """Return its change to the model, or None."""
        return None

    def recipe(self, *, seed: int, layout: Layout | None) -> "Recipe | None":
        """Return what makes the optimizer; None if the core or another extension makes it.

        Args:
            seed: The run's seed.
            layout: The run's layout; None if no run is started.
        """
        return None

    def adjust(
        self, config: CoreConfig, setup: "TrainSetup", strategy: "AcceleratedStrategy"
    ) -> "tuple[CoreConfig, TrainSetup]":
        """Adjust options and setup of a training to the prepared model on the device.

        `self` has the original options. Every rank must return the same.

        Args:
            config: The options, with the choices of the setup.
            setup: The setup for these options.
            strategy: The prepared model; neither its weights nor its optimizer may change.
        """
        return config, setup

    def in_loop(self, running: Running) -> LoopExtension | None:
        """Return its part in training or evaluation; None if the options do not ask for it."""
        return None

    def bytes_per_parameter(self) -> float:
        """Return the device memory that it needs for each trained parameter."""
        return 0.0

    def fetch(self, folder: Path, fetch_dataset: FetchDataset) -> dict[str, Any]:
        """Download inputs on the Hub into a folder, for `python -m llm.fetch`.

        Args:
            folder: An absolute path.
            fetch_dataset: Called with the name of the option, and the name and configuration of a
                data set; downloads it and returns its folder.

        Returns:
            The options with local paths instead of names.
        """
        return {}


def extensions_of(config: CoreConfig) -> Iterator[tuple[type[Extension], Extension]]:
    """Yield each listed extension, and the options to call its methods with."""
    if isinstance(config, Extension):
        for extension in config.listed:
            yield extension, config


def loop_extensions(config: CoreConfig, running: Running) -> list[LoopExtension]:
    """Return the parts of all extensions in training or in an evaluation."""
    parts = (extension.in_loop(options, running) for extension, options in extensions_of(config))
    return [part for part in parts if part is not None]


def transforms_of(config: CoreConfig, model_config: "PreTrainedConfig") -> "list[Transform]":
    """Return the changes of all extensions to a model."""
    transforms = (
        extension.transform(options, model_config) for extension, options in extensions_of(config)
    )
    return [transform for transform in transforms if transform is not None]


def recipe_of(config: CoreConfig, *, seed: int, layout: Layout | None = None) -> "Recipe":
    """Return what makes the optimizer of a run.

    Args:
        config: The options.
        seed: The run's seed.
        layout: The run's layout; None if no run is started.
    """
    from llm.optim.optimizers import make_optimizer
    from llm.optim.run_optimizer import Recipe

    extensions = extensions_of(config)
    recipes = (
        extension.recipe(options, seed=seed, layout=layout) for extension, options in extensions
    )
    extension_recipe = next((recipe for recipe in recipes if recipe is not None), None)
    return extension_recipe or Recipe(partial(make_optimizer, config))


def choose_layout(
    config: CoreConfig, *, ranks: int, ranks_per_node: int, start: "Checkpoint | None"
) -> Layout:
    """Return the first layout that an extension's options ask for, or else the core's.

    Args:
        config: The options.
        ranks: Number of all ranks.
        ranks_per_node: Number of consecutive ranks on each node.
        start: The checkpoint that the run resumes, branches from, or evaluates.

    Raises:
        ConfigError: The layout does not allow this number of ranks.
    """
    for extension, options in extensions_of(config):
        layout = extension.layout(options, ranks=ranks, ranks_per_node=ranks_per_node, start=start)
        if layout is not None:
            return layout
    parallel_dims(config, ranks)  # refuses ranks that cannot be divided
    return Layout()
