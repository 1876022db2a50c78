"""A run, the interface of its extensions, and the functions of the core that call them.

An extension is a folder of `llm/extensions/` with an `options.py`, which declares its options and a
subclass of [Extension][llm.trainers.gpt.seams.Extension]; `llm/trainers/gpt/extensions.py` lists
the subclass. The core calls extensions in the order of that list. `docs/extend.md` builds one.
"""

import typing
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from llm.config.options import Package
from llm.errors import ConfigError
from llm.parallel.dims import make_parallel_dims
from llm.parallel.layout import Layout
from llm.trainers.gpt.config import CoreConfig, extensions_in_use

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

    from llm.checkpoint.format import Checkpoint
    from llm.checkpoint.run_folder import RunFolder
    from llm.data.corpus import Corpus
    from llm.data.loader import StepBatch, TrainLoader
    from llm.data.order import DocumentBoundaries
    from llm.models.loss_chunks import LossChunks
    from llm.models.transforms import Transform
    from llm.optim.run_optimizer import OptimizerFactory
    from llm.optim.schedule import Schedule
    from llm.parallel.base import AcceleratedStrategy
    from llm.parallel.dims import ParallelDims
    from llm.runtime.world import World

OptionsT = TypeVar("OptionsT", bound=CoreConfig)

_CORE_PARTS = ("strategy", "train", "meter")
"""The parts of every checkpoint, apart from those of optimizers."""

_CORE_WORK = "evaluated"
"""The name in the state of a run that no periodic work can have: NAME_at is its last step."""

FetchDataset = Callable[[str, str, str | None], str]
"""Takes the name of an option, and the name and configuration of a data set; downloads it and
returns its folder."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """A training or an evaluation: its options, and what is read before it starts.

    Attributes:
        config: The options, with the values chosen for this run.
        world: Rank and world size of this process.
        folder: The run's folder.
        resume_from: The checkpoint to resume from or to evaluate, or None.
        branch_from: The parent's checkpoint that a new branch starts from, or None.
        init_from: The checkpoint that gives a new run its weights, or None.
        model_config: The model's Hugging Face configuration.
        weights_from: Hub name or folder of pretrained weights, or None to start from scratch.
        initial_weights: Source of the weights at step 0, also in a resumed run or a branch: such as
            `from gpt2`, or `random, seed 1`.
        tokenizer: The tokenizer.
        block_size: Tokens of a sample.
        document_boundaries: How to keep the documents of a sample apart; None ignores them.
        metrics: Metrics of the evaluate library by name.
        dims: How the ranks divide one model and its data.
        layout: How the ranks train.
        extensions: The extensions, in calling order.
        loss_chunks: The size of the loss's chunks on an accelerator; None on a CPU.
        corpus: Training and validation tokens. It is empty when `Extension.prepare_run` is called.
    """

    config: CoreConfig
    world: "World"
    folder: "RunFolder"
    resume_from: "Checkpoint | None"
    branch_from: "Checkpoint | None"
    init_from: "Checkpoint | None"
    model_config: "PreTrainedConfig"
    weights_from: str | None
    initial_weights: str
    tokenizer: "PreTrainedTokenizerBase"
    block_size: int
    document_boundaries: "DocumentBoundaries | None"
    metrics: dict[str, Any]
    dims: "ParallelDims"
    layout: Layout
    extensions: "tuple[Extension[Any], ...]"
    loss_chunks: "LossChunks | None"
    corpus: "Corpus"

    @property
    def seed(self) -> int:
        """The run's seed, drawn unless the options had one."""
        assert self.config.seed is not None
        return self.config.seed

    @property
    def start(self) -> "Checkpoint | None":
        """The checkpoint that the run resumes, branches from, or evaluates."""
        return self.resume_from or self.branch_from


@dataclass(frozen=True)
class LoopContext:
    """A run with a prepared model, as extensions in its loop get it.

    Attributes:
        run: The run.
        strategy: The model and its optimizer, on any layout.
        model: The model for the log's description.
        keep_alive: Call this at least once every `timeout` seconds during long operations, on all
            ranks equally often. On a request to stop it raises `StopRequest`.
        paused: Returns a context with time that does not count as training.
    """

    run: Run
    strategy: "AcceleratedStrategy"
    model: "PreTrainedModel"
    keep_alive: Callable[[], None]
    paused: Callable[[], AbstractContextManager[None]]


@dataclass(frozen=True, kw_only=True)
class ExtraWeights:
    """Other weights for the trained model, such as an average.

    Attributes:
        prefix: Prefix of their evaluation results, such as `ema_`.
        is_evaluated: Whether each evaluation evaluates these weights, too.
        is_exported: Whether the export has these weights instead of the last ones.
        description: Description for the log.
        card: Description for the model card.
        swap_in: Returns a context that gives these weights to the model.
    """

    prefix: str
    is_evaluated: bool
    is_exported: bool
    description: str
    card: str
    swap_in: Callable[[], AbstractContextManager[None]]


@dataclass(frozen=True, kw_only=True)
class SavedWeights:
    """Weights in a part of checkpoints, which `llm-trainers checkpoints --export` can export.

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


@dataclass(frozen=True, kw_only=True)
class Fetch:
    """Inputs on the Hub that `llm-trainers fetch` downloads.

    Attributes:
        options: The class of options that the program takes in addition.
        download: Takes the run's options, the absolute path of a folder to write to, and a function
            that downloads a data set. Returns options with local paths instead of names.
    """

    options: type
    download: Callable[[Any, Path, FetchDataset], dict[str, Any]]


@dataclass(frozen=True)
class Periodic:
    """The work of an extension every few steps, and after the last step.

    A resume catches up on work that was due at the checkpoint's step, if the stop left no time.

    Attributes:
        name: Unique name among extensions, also used in checkpoints.
        interval_steps: Steps between two calls; None for a single call after the last step.
        run: Takes the number of steps done, and returns values for `metrics.jsonl` and the trackers
            by name. Its time does not count as training.
    """

    name: str
    interval_steps: int | None
    run: Callable[[int], dict[str, float]]


class LoopExtension:
    """Takes part in training or in an evaluation; every rank calls every method.

    Attributes:
        part: Name of the extension's state in checkpoints; None if it has no state.
        description: Description of the state, for the log.
        weights: Other weights for the model, or None.
        periodic: Work to do every few steps, or None.
        before_update: Called between the backward passes and the update of a step, or None.
            Gradients are averaged over ranks and unscaled, and not clipped. Its time counts as
            training, and it should not read from the device.
    """

    part: ClassVar[str | None] = None
    description: ClassVar[str] = ""
    weights: ExtraWeights | None = None
    periodic: Periodic | None = None
    before_update: Callable[[], None] | None = None

    def describe(self) -> list[str]:
        """Return lines for the log at the start; the state has been loaded."""
        return []

    def before_step(self, step: int) -> None:
        """Called before a training step.

        Args:
            step: Steps done.
        """

    def after_step(self, step: int, batch: "StepBatch") -> None:
        """Called after a training step; its time counts as training.

        The host runs ahead of the device: a read from the device waits for the whole step.

        Args:
            step: Steps done.
            batch: The samples of the step.
        """

    def check_losses(
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

    def metrics(self) -> tuple[dict[str, float], str]:
        """Return the values of a logging interval; the host may wait for the device here.

        Returns:
            Values by name for `metrics.jsonl` and the trackers; and a column for the line of the
            step on a terminal, empty for none.
        """
        return {}, ""

    def close(self) -> None:
        """Called after the last step of this start."""

    def task_results(self) -> dict[str, dict[str, float]]:
        """Return results of the trained model by task and metric, for its card.

        Called at the end of training, and of an evaluation without training.
        """
        return {}

    def card_rows(self) -> dict[str, object]:
        """Return rows for the table of the model card, such as {"experts": "4 layers of 8"}.

        Called on rank 0 at the end of training.
        """
        return {}

    def begin(self) -> None:
        """Initialize the part if a checkpoint does not have it."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state: plain values, and tensors by the names of the model's parameters."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the state; live tensors have already been overwritten."""


class Extension(Generic[OptionsT]):
    """A feature of some runs; it imports its code where needed, because `--help` loads no torch.

    A run makes one object from its options, and calls the methods in this order. Other programs
    make one for `find_problems`, `make_layout`, `make_transform`, `make_optimizer_factory` and
    `bytes_per_parameter`.

    Args:
        options: The options of the run, with the values chosen for its device.

    Attributes:
        options: The same. The class is the argument of the base: `Extension[SpikeOptions]`.
        saved_weights: Further weights in checkpoints.
        fetch: Inputs on the Hub.
        package: The installed package that it belongs to; None if it belongs to this package.
    """

    package: ClassVar[Package | None] = None
    saved_weights: ClassVar[SavedWeights | None] = None
    fetch: ClassVar[Fetch | None] = None

    def __init__(self, options: OptionsT) -> None:
        self.options = options

    def find_problems(self) -> list[str]:
        """Return a sentence for each combination of options that cannot work.

        It checks the extension's options among themselves and against the core's.
        """
        return []

    def make_layout(
        self, *, ranks: int, ranks_per_node: int, start: "Checkpoint | None"
    ) -> Layout | None:
        """Return the layout that the options ask for; None if they do not ask for one.

        Args:
            ranks: Number of all ranks.
            ranks_per_node: Number of consecutive ranks on each node.
            start: The checkpoint that the run resumes, branches from, or evaluates.

        Raises:
            ConfigError: The layout does not allow this number of ranks.
        """
        return None

    def prepare_run(self, run: Run) -> None:
        """Check the inputs of a run, and read further ones into attributes.

        Args:
            run: The run, before its data are opened.

        Raises:
            LLMError: The extension cannot work with these inputs.
        """

    def make_transform(self, model_config: "PreTrainedConfig") -> "Transform | None":
        """Return the extension's change to the model, or None."""
        return None

    def change_schedule(self, schedule: "Schedule", *, total_steps: int) -> "Schedule":
        """Return the learning rate by step: another function, or the given one.

        A run whose schedule an extension changes cannot grow on resume.

        Args:
            schedule: The core's, or the result of the extension before.
            total_steps: Optimizer steps of the run.

        Raises:
            ConfigError: The schedule does not fit into the run.
        """
        return schedule

    def make_optimizer_factory(
        self, *, seed: int, layout: Layout | None
    ) -> "OptimizerFactory | None":
        """Return the factory of the optimizer; None if the core or another extension has it.

        Args:
            seed: The run's seed.
            layout: The run's layout; None if no run is started.
        """
        return None

    def make_loop_extension(self, context: LoopContext) -> LoopExtension | None:
        """Return the object that takes part in the loop; None if the options do not ask for it."""
        return None

    def trial_context(self, context: LoopContext) -> AbstractContextManager[None]:
        """Return a context for trial steps, which measure the memory of a micro-batch.

        Inside it, a forward and backward pass has the activations that the loop extension adds.
        """
        return nullcontext()

    def bytes_per_parameter(self) -> float:
        """Return the device memory that `make_loop_extension` takes for each trained parameter.

        `llm-trainers plan` counts it, and so does `--per_device_train_batch_size auto`, which
        measures a run without it. It does not include the memory of an optimizer, which
        `RunOptimizer.memory` returns.

        Raises:
            ConfigError: The options cannot be planned.
        """
        return 0.0


def list_option_classes(extensions: Iterable[type[Extension[Any]]]) -> list[type]:
    """Return the class of options of each extension that declares one, in the order of extensions.

    It is the argument of the base class, such as `SpikeOptions` of `Extension[SpikeOptions]`.
    """
    generic_bases = (base for extension in extensions for base in vars(extension)["__orig_bases__"])
    extension_bases = (base for base in generic_bases if typing.get_origin(base) is Extension)
    classes = (typing.get_args(base)[0] for base in extension_bases)
    return [options_class for options_class in classes if options_class is not CoreConfig]


def make_extensions(config: CoreConfig) -> tuple[Extension[Any], ...]:
    """Return an object of each extension that takes part, in calling order."""
    return tuple(extension(config) for extension in extensions_in_use(config))


def choose_layout(
    config: CoreConfig,
    extensions: Sequence[Extension[Any]],
    *,
    ranks: int,
    ranks_per_node: int,
    start: "Checkpoint | None",
) -> Layout:
    """Return the first layout that an extension's options ask for, or else the core's.

    Raises:
        ConfigError: The layout does not allow this number of ranks.
    """
    for extension in extensions:
        layout = extension.make_layout(ranks=ranks, ranks_per_node=ranks_per_node, start=start)
        if layout is not None:
            return layout
    make_parallel_dims(config, ranks)  # refuses ranks that cannot be divided
    return Layout()


def list_transforms(
    extensions: Iterable[Extension[Any]], model_config: "PreTrainedConfig"
) -> "list[Transform]":
    """Return the changes of all extensions to a model."""
    transforms = (extension.make_transform(model_config) for extension in extensions)
    return [transform for transform in transforms if transform is not None]


def choose_factory(
    config: CoreConfig,
    extensions: Iterable[Extension[Any]],
    *,
    seed: int,
    layout: Layout | None = None,
) -> "OptimizerFactory":
    """Return the optimizer factory of the first extension that has one, or else the core's."""
    from llm.optim.adamw_and_sgd import make_optimizer
    from llm.optim.run_optimizer import OptimizerFactory

    factories = (
        extension.make_optimizer_factory(seed=seed, layout=layout) for extension in extensions
    )
    factory = next((factory for factory in factories if factory is not None), None)
    return factory or OptimizerFactory(partial(make_optimizer, config))


def changes_schedule(config: CoreConfig) -> bool:
    """Return whether an extension that takes part may change the learning rates."""
    return any(
        extension.change_schedule is not Extension.change_schedule
        for extension in extensions_in_use(config)
    )


def make_loop_extensions(context: LoopContext) -> list[LoopExtension]:
    """Return the objects of all extensions that take part in training or in an evaluation.

    Raises:
        ConfigError: Two have the same name for their state or their periodic work.
    """
    loop_extensions = [
        loop_extension
        for extension in context.run.extensions
        if (loop_extension := extension.make_loop_extension(context)) is not None
    ]
    part_names = [*_CORE_PARTS, *context.strategy.run_optimizer.parts()]
    part_names += [extension.part for extension in loop_extensions if extension.part is not None]
    work_names = [_CORE_WORK]
    work_names += [extension.periodic.name for extension in loop_extensions if extension.periodic]
    _refuse_repeated_name(part_names, "part of checkpoints")
    _refuse_repeated_name(work_names, "periodic work")
    return loop_extensions


def _refuse_repeated_name(names: Sequence[str], kind: str) -> None:
    """Refuse names of extensions in which one appears twice; `kind` says what they name."""
    repeated_names = [name for name in names if names.count(name) > 1]
    if repeated_names:
        raise ConfigError(
            f"Two extensions have a {kind} named {repeated_names[0]}; leave one of them out, "
            "or give its part another name."
        )


def evaluate_weights(
    evaluate: Callable[[], dict[str, float]],
    extensions: Iterable[LoopExtension],
    *,
    is_final: bool,
) -> dict[str, float]:
    """Evaluate the model with its current weights, and with the other weights of extensions.

    Args:
        evaluate: Evaluates the model with its current weights; returns results by name.
        extensions: The extensions that take part in this run.
        is_final: Whether this is the evaluation at the end of training, which evaluates the weights
            for the export.

    Returns:
        All results by name; the names of other weights' results begin with their prefix.
    """
    results = evaluate()
    for weights in (extension.weights for extension in extensions):
        if weights is not None and (weights.is_evaluated or (weights.is_exported and is_final)):
            with weights.swap_in():
                values = evaluate()
            results |= {f"{weights.prefix}{name}": value for name, value in values.items()}
    return results
