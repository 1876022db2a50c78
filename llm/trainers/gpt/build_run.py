"""Builds the objects of a run from its configuration and the result of `inputs`."""

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from llm.checkpoint.format import Checkpoint
from llm.checkpoint.load import load_model, parts_of
from llm.checkpoint.retention import mark_superseded
from llm.errors import ParallelError
from llm.metrics.hardware import device_memory
from llm.models.attention import check_documents_apart, use_document_attention
from llm.models.build import build_model, set_special_tokens
from llm.models.causality import check_causal, check_outline_causal
from llm.models.compilation import compile_blocks
from llm.models.init import dummy_weights, without_weights
from llm.models.loss import make_loss
from llm.models.weight_files import find_weight_files
from llm.optim.groups import scale_learning_rates
from llm.optim.run_optimizer import RunOptimizer
from llm.parallel.accelerator import make_accelerator
from llm.parallel.base import AcceleratedStrategy
from llm.parallel.context import check_divisible
from llm.parallel.pipeline.stage import check_cut
from llm.parallel.sharded_init import fill_model
from llm.parallel.tensor import check_compiled_dropout
from llm.runtime.agreement import gather
from llm.runtime.logging import event
from llm.runtime.world import World, device_of
from llm.trainers.gpt.config import CoreConfig
from llm.trainers.gpt.loop import Trainer
from llm.trainers.gpt.resume import log_changes
from llm.trainers.gpt.run_setup import RunSetup, TrainSetup
from llm.trainers.gpt.seams import LoopExtension, Running, choose_factory, transforms_of
from llm.trainers.gpt.trained_model import generation_settings

logger = logging.getLogger("llm")


def make_model(config: CoreConfig, setup: RunSetup, world: World) -> PreTrainedModel:
    """Build the model on this process' device, or on the meta device if ranks hold shards of it.

    Raises:
        ConfigError: The model has no such weights, attention kernel or checkpointing.
    """
    device = device_of(world)
    if device.index is not None:
        torch.accelerator.set_device_index(device.index)
    build = partial(
        build_model,
        config,
        setup.model_config,
        weights_from=setup.weights_from,
        seed=setup.seed,
        vocab_size=len(setup.tokenizer),
        tensor_parallel_size=config.tensor_parallel_size,
        transforms=transforms_of(setup.extensions, setup.model_config),
    )
    # Ranks draw or read their shards once the model is sharded.
    model = build(device=device if setup.dims.is_replicated else torch.device("meta"))
    source = setup.weights_from
    on_meta = model.device.type == "meta"
    if source is not None and on_meta and find_weight_files(model, source) is None:
        model = build(device=device)  # each rank reads all of it
    settings = generation_settings(setup.start)
    if settings is not None:
        model.generation_config = settings
    is_pretrained = source is not None or settings is not None
    set_special_tokens(model, setup.tokenizer, is_pretrained=is_pretrained)
    has_values = model.device.type != "meta"
    if not has_values:
        check_outline_causal(model)
    with dummy_weights(model, device):
        _check_use(config, setup, model, has_values)
    return model


def _check_use(
    config: CoreConfig, setup: RunSetup, model: PreTrainedModel, has_values: bool
) -> None:
    """Refuse a model that is not causal, or if the options would change its results.

    Args:
        config: The options.
        setup: The run's inputs.
        model: The model, perhaps with dummy weights.
        has_values: Whether it has its own weights and buffers.
    """
    boundaries, dims = setup.document_boundaries, setup.dims
    if has_values:
        check_causal(model)
    # Context parallelism uses a different attention.
    if (
        boundaries is not None
        and boundaries.attention
        and dims.context == 1
        and model.device.type != "cpu"
    ):
        # FlexAttention is compiled, and a deterministic run on a GPU must not be.
        flex = config.attention_implementation is None and model.device.type == "cuda"
        use_document_attention(model, flex=flex and not config.deterministic)
    if boundaries is not None:
        check_documents_apart(model, positions=boundaries.positions, attention=boundaries.attention)
    if dims.context > 1:
        check_divisible(model, ranks=dims.context, block_size=setup.block_size)
    if dims.tensor > 1 and config.torch_compile:
        check_compiled_dropout(model, sequence_parallel=config.sequence_parallel)
    if dims.pipeline > 1:
        check_cut(model, dims.pipeline * config.virtual_stages)


def make_strategy(
    config: CoreConfig, setup: RunSetup, model: PreTrainedModel, world: World
) -> tuple[AcceleratedStrategy, PreTrainedModel]:
    """Form the process groups, and prepare the strategy with the model and its optimizer.

    Returns:
        The strategy; and the model for the log and the model card. With pipeline stages this is a
        copy without weights, because each stage keeps only its layers.
    """
    model_for_logging = without_weights(model) if setup.dims.pipeline > 1 else model
    accelerator = make_accelerator(config, device=device_of(world), timeout=config.timeout)
    if getattr(model.config.get_text_config(), "is_decoder", None):
        # Decoders of translation models, such as BART, have unused cross-attention.
        accelerator.ddp_handler.find_unused_parameters = True
    transforms = transforms_of(setup.extensions, setup.model_config)
    init_weights = None
    if model.device.type == "meta":
        source = setup.weights_from
        init_weights = partial(
            fill_model,
            config,
            seed=setup.seed,
            device=accelerator.device,
            files=(find_weight_files(model, source) if source else None) or (),
            transforms=transforms,
        )
    strategy = setup.layout.make(config, setup.dims, accelerator, init_weights=init_weights)
    loss = make_loss(
        config,
        model,
        device=strategy.device,
        memory=device_memory(strategy.device),
        divided_head=setup.dims.tensor > 1,
        sources=[corpus_source.name for corpus_source in setup.corpus.train]
        if config.log_source_losses
        else (),
    )
    if config.torch_compile:
        compile_blocks(model)

    factory = choose_factory(config, setup.extensions, seed=setup.seed, layout=setup.layout)
    with dummy_weights(model, strategy.device), strategy.autocast():
        factory.inspect_model(model)

    def optimizer_of(model: nn.Module, mesh: DeviceMesh | None) -> RunOptimizer:
        run_optimizer = factory.make(model, mesh)
        for transform in transforms:
            scale_learning_rates(run_optimizer.optimizer, model, transform.rate_factor)
        return run_optimizer

    strategy.prepare(loss, optimizer_of)
    return strategy, model_for_logging


def make_loop_extensions(
    setup: RunSetup,
    strategy: AcceleratedStrategy,
    model: PreTrainedModel,
    *,
    keep_alive: Callable[[], None],
    paused: Callable[[], AbstractContextManager[None]],
) -> list[LoopExtension]:
    """Return the parts of all extensions in training or in an evaluation.

    Args:
        setup: The run's inputs.
        strategy: The prepared model and its optimizer.
        model: The model for the log's description.
        keep_alive: Extensions call it during long operations.
        paused: Returns a context with time that does not count as training.
    """
    running = Running(
        folder=setup.run.path,
        seed=setup.seed,
        corpus=setup.corpus,
        strategy=strategy,
        model=model,
        keep_alive=keep_alive,
        paused=paused,
    )
    parts = (extension.in_loop(running) for extension in setup.extensions)
    return [part for part in parts if part is not None]


def check_same_start(setup: RunSetup) -> None:
    """Refuse to train if ranks have read different checkpoints, seeds or data.

    Raises:
        ParallelError: Names the inputs of two ranks; raised on all ranks.
    """
    start = setup.start or setup.init_from
    local_start = {
        "checkpoint": None if start is None else f"{start.path.name} of {start.saved_at}",
        "seed": setup.seed,
    }
    if isinstance(setup, TrainSetup):
        local_start["windows"] = setup.samples.num_windows
        # A sidecar may exist on only some nodes.
        local_start["data"] = f"{setup.data_digest['ends']}-{setup.data_digest['places']}"
    starts = gather(local_start)
    for rank, rank_start in enumerate(starts):
        if rank_start != starts[0]:
            raise ParallelError(
                f"Rank 0 starts from {starts[0]}, but rank {rank} from {rank_start}: a folder is "
                "not the same on all nodes, or its contents are out of date there; start again, "
                "and if this does not help, move --output_dir and the data to a file system that "
                "all nodes share."
            )


def load_weights(checkpoint: Checkpoint | None, strategy: AcceleratedStrategy) -> None:
    """Load the weights of a checkpoint, if there is one, without its optimizer.

    Raises:
        CheckpointError: The checkpoint belongs to another model.
    """
    if checkpoint is not None:
        load_model(checkpoint, strategy.state_dict()["model"])


def load_start(setup: TrainSetup, trainer: Trainer) -> None:
    """Load the checkpoint to continue from, if any, into the trainer.

    Raises:
        CheckpointError: The checkpoint belongs to another model or optimizer.
    """
    if setup.start is None:
        return
    parts, saved = trainer.parts, parts_of(setup.start)
    new = {
        candidate.part: candidate
        for candidate in trainer.extensions
        if candidate.part and candidate.part not in saved
    }
    setup.layout.load(setup.start, {name: part for name, part in parts.items() if name not in new})
    for extension in new.values():
        extension.begin()
        logger.info(f"{setup.start.path} has no {extension.description}: it begins here.")
    unused_parts = [name for name in saved if name not in parts]
    if unused_parts:
        logger.info(
            f"{setup.start.path} also holds {' and '.join(unused_parts)}, which this run does not "
            "continue."
        )


def leave_later_steps(config: CoreConfig, setup: TrainSetup, trainer: Trainer) -> None:
    """Log the first step, and set later checkpoints of the run aside."""
    if setup.start is None:
        return
    step = trainer.state.step
    if setup.resume_from is None:  # the start is the parent's checkpoint
        path = str(setup.start.path)
        logger.info(
            f"Branched from {path} at step {step}.",
            extra=event("branch", step=step, checkpoint=path),
        )
    else:
        if trainer.strategy.rank == 0:
            # Otherwise the next resume would take a later, abandoned checkpoint.
            mark_superseded(setup.run.checkpoints, step=step)
        logger.info(
            f"Resumed from {setup.start.path} at step {step}.",
            extra=event("resume", step=step, checkpoint=setup.start.path.name),
        )
    log_changes(config, setup.start, ranks=trainer.strategy.world_size)
    if step == setup.plan.total_steps:
        logger.info(f"All {step:,} steps are already done: nothing is left to train.")
