"""Builds the objects of a run from its configuration and the result of `inputs`."""

import logging
from collections.abc import Sequence
from functools import partial

import torch
from accelerate import Accelerator, DistributedType
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from llm.checkpoint.format import Checkpoint
from llm.checkpoint.load import list_saved_tensors, load_model, read_part_names
from llm.checkpoint.retention import mark_superseded
from llm.errors import ParallelError
from llm.models.attention import check_documents_apart, use_document_attention
from llm.models.attention_kernels import disable_faulty_cudnn_attention
from llm.models.build import build_model, set_special_tokens
from llm.models.causality import check_causal, check_meta_model_causal
from llm.models.compilation import can_compile, compile_blocks, make_compilation_reproducible
from llm.models.init import copy_to_meta, dummy_weights
from llm.models.loss import make_loss
from llm.models.transforms import Transform
from llm.models.unused_weights import find_unused_weights
from llm.models.weight_files import find_weight_files
from llm.optim.groups import scale_learning_rates
from llm.optim.run_optimizer import OptimizerFactory, RunOptimizer
from llm.parallel.accelerator import make_accelerator
from llm.parallel.base import AcceleratedStrategy
from llm.parallel.context import check_context_parallel
from llm.parallel.pipeline.stage import check_cut
from llm.parallel.sharded_init import fill_model
from llm.parallel.tensor import check_compiled_dropout
from llm.runtime.agreement import gather
from llm.runtime.logging import event
from llm.runtime.world import device_of
from llm.trainers.gpt.load_trained_model import read_generation_settings
from llm.trainers.gpt.loop import Trainer
from llm.trainers.gpt.resume import log_changes
from llm.trainers.gpt.seams import Run, choose_factory, list_transforms
from llm.trainers.gpt.training_run import TrainingRun

logger = logging.getLogger("llm")


def make_model(run: Run) -> PreTrainedModel:
    """Build the model on this process' device, or on the meta device if ranks hold shards of it.

    Raises:
        ConfigError: The model has no such weights, attention kernel or checkpointing.
    """
    device = device_of(run.world)
    if device.index is not None:
        torch.accelerator.set_device_index(device.index)
    disable_faulty_cudnn_attention(device, block_size=run.block_size)
    model = _build_model(run, device)
    generation_config = read_generation_settings(run.start)
    if generation_config is not None:
        model.generation_config = generation_config
    is_pretrained = run.weights_from is not None or generation_config is not None
    set_special_tokens(model, run.tokenizer, is_pretrained=is_pretrained)
    has_values = model.device.type != "meta"
    if not has_values:
        check_meta_model_causal(model)
    with dummy_weights(model, device):
        if has_values:
            check_causal(model)
        if run.document_boundaries is not None and run.document_boundaries.attention:
            _use_document_attention(run, model)
        _check_model(run, model)
    return model


def _build_model(run: Run, device: torch.device) -> PreTrainedModel:
    """Build the model on a device, or on the meta device if each rank fills only its shards."""
    build = partial(
        build_model,
        run.config,
        run.model_config,
        weights_from=run.weights_from,
        seed=run.seed,
        vocab_size=len(run.tokenizer),
        tensor_parallel_size=run.config.tensor_parallel_size,
        transforms=list_transforms(run.extensions, run.model_config),
    )
    # Ranks draw or read their shards once the model is sharded.
    model = build(device=device if run.dims.is_replicated else torch.device("meta"))
    weights_from = run.weights_from
    is_on_meta = model.device.type == "meta"
    if weights_from is not None and is_on_meta and find_weight_files(model, weights_from) is None:
        model = build(device=device)  # each rank reads all weights
    return model


def _use_document_attention(run: Run, model: PreTrainedModel) -> None:
    """Let attention skip the tokens of other documents, where the device has a kernel for it."""
    # Context parallelism uses a different attention.
    if run.dims.context > 1 or model.device.type == "cpu":
        return
    # FlexAttention is compiled, and a deterministic run on a GPU must not be.
    is_free_choice = run.config.attention_implementation is None
    use_document_attention(
        model,
        flex=is_free_choice and model.device.type == "cuda" and not run.config.deterministic,
    )


def _check_model(run: Run, model: PreTrainedModel) -> None:
    """Refuse a model that would compute something else with the options of the run."""
    boundaries, dims = run.document_boundaries, run.dims
    if boundaries is not None:
        check_documents_apart(model, positions=boundaries.positions, attention=boundaries.attention)
    if dims.context > 1:
        check_context_parallel(model, num_ranks=dims.context, block_size=run.block_size)
    if dims.tensor > 1 and run.config.torch_compile:
        check_compiled_dropout(model, sequence_parallel=run.config.sequence_parallel)
    if dims.pipeline > 1:
        check_cut(model, dims.pipeline * run.config.virtual_stages)


def make_strategy(run: Run, model: PreTrainedModel) -> tuple[AcceleratedStrategy, PreTrainedModel]:
    """Form the process groups, and prepare the strategy with the model and its optimizer.

    Returns:
        The strategy; and the model for the log and the model card. With pipeline stages this is a
        copy without weights, because each stage has only its layers.
    """
    model_for_logging = copy_to_meta(model) if run.dims.pipeline > 1 else model
    accelerator = make_accelerator(
        run.config, device=device_of(run.world), timeout=run.config.timeout
    )
    frozen_weights = _find_frozen_weights(run, model, accelerator)
    transforms = list_transforms(run.extensions, run.model_config)
    init_weights = None
    if model.device.type == "meta":
        files = find_weight_files(model, run.weights_from) if run.weights_from else None
        init_weights = partial(
            fill_model,
            run.config,
            seed=run.seed,
            device=accelerator.device,
            files=files or (),
            transforms=transforms,
        )
    strategy = run.layout.make_strategy(
        run.config, run.dims, accelerator, init_weights=init_weights
    )
    loss = _make_run_loss(run, model, strategy.device)
    if run.config.torch_compile:
        _compile_model(run, model, strategy.device)
    factory = choose_factory(run.config, run.extensions, seed=run.seed, layout=run.layout)
    with dummy_weights(model, strategy.device), strategy.autocast():
        factory.inspect_model(model)
    make_run_optimizer = partial(
        _make_run_optimizer, factory, transforms, frozen_weights=frozen_weights
    )
    strategy.prepare(loss, make_run_optimizer)
    return strategy, model_for_logging


def _find_frozen_weights(
    run: Run, model: PreTrainedModel, accelerator: Accelerator
) -> Sequence[str]:
    """Return the weights that the loss does not use, if DistributedDataParallel replicates them.

    If they cannot be found, DistributedDataParallel searches for them in each step.
    """
    uses_ddp = run.dims.replicate == run.dims.world_size
    if not uses_ddp or accelerator.distributed_type == DistributedType.NO:
        return ()
    unused_weights = find_unused_weights(model, length=run.block_size)
    accelerator.ddp_handler.find_unused_parameters = unused_weights is None
    return unused_weights or ()


def _make_run_loss(run: Run, model: PreTrainedModel, device: torch.device) -> nn.Module:
    """Return the loss of the model, with the chunks, precision and sums of the run's options."""
    source_names = [source.name for source in run.corpus.train]
    return make_loss(
        run.config,
        model,
        device=device,
        chunks=run.loss_chunks,
        is_head_sharded=run.dims.tensor > 1,
        is_float8=run.config.fp8_head,
        sources=source_names if run.config.log_source_losses else (),
    )


def _compile_model(run: Run, model: PreTrainedModel, device: torch.device) -> None:
    """Compile the blocks of a model as the options ask, in place."""
    if run.config.deterministic:
        make_compilation_reproducible()
    fuse_backward = run.config.fused_kernels == "all" and can_compile(device)
    compile_blocks(model, fuse_backward=fuse_backward)


def _make_run_optimizer(
    factory: OptimizerFactory,
    transforms: Sequence[Transform],
    model: nn.Module,
    mesh: DeviceMesh | None,
    *,
    frozen_weights: Sequence[str],
) -> RunOptimizer:
    """Return the optimizer of a prepared model, with the learning rates of all weights."""
    run_optimizer = factory.make(model, mesh)
    for transform in transforms:
        scale_learning_rates(run_optimizer.optimizer, model, transform.rate_factor)
    # The loss does not use these weights, and DistributedDataParallel would wait for their
    # gradients, so they get none. The optimizer keeps their state, so that checkpoints are the same
    # in all layouts.
    for name in frozen_weights:
        model.get_parameter(name).requires_grad_(False)
    return run_optimizer


def check_same_start(run: Run) -> None:
    """Refuse to train if ranks have read different checkpoints, seeds or data.

    Raises:
        ParallelError: Names the inputs of two ranks; raised on all ranks.
    """
    inputs_by_rank = gather(_describe_inputs(run))
    for rank, rank_inputs in enumerate(inputs_by_rank):
        if rank_inputs != inputs_by_rank[0]:
            raise ParallelError(
                f"Rank 0 starts from {inputs_by_rank[0]}, but rank {rank} from {rank_inputs}: a "
                "folder is not the same on all nodes, or its contents are out of date there; "
                "start again, and if this does not help, move --output_dir and the data to a file "
                "system that all nodes share."
            )


def load_weights(checkpoint: Checkpoint | None, strategy: AcceleratedStrategy) -> None:
    """Load the weights of a checkpoint, if there is one, without its optimizer.

    Raises:
        CheckpointError: The checkpoint belongs to another model.
    """
    if checkpoint is not None:
        load_model(checkpoint, strategy.state_dict()["model"])


def _describe_inputs(run: Run) -> dict[str, str | int | None]:
    """Return what must be the same on all ranks: checkpoint, seed and data."""
    start = run.start or run.init_from
    inputs: dict[str, str | int | None] = {
        "checkpoint": None if start is None else f"{start.path.name} of {start.saved_time}",
        "seed": run.seed,
    }
    if isinstance(run, TrainingRun):
        inputs["windows"] = run.samples.num_windows
        # A sidecar may exist on only some nodes, so its digest is not compared.
        inputs["data"] = f"{run.data_digest['ends']}-{run.data_digest['places']}"
    return inputs


def load_start_checkpoint(trainer: Trainer) -> None:
    """Load the checkpoint to continue from, if any, into the trainer.

    Raises:
        CheckpointError: The checkpoint belongs to another model or optimizer.
    """
    run = trainer.run
    if run.start is None:
        return
    parts, saved_part_names = trainer.parts, read_part_names(run.start)
    new_extensions = [
        extension
        for extension in trainer.extensions
        if extension.part and extension.part not in saved_part_names
    ]
    new_part_names = {extension.part for extension in new_extensions}
    parts_to_load = {name: part for name, part in parts.items() if name not in new_part_names}
    trainer.strategy.run_optimizer.prepare_load(partial(list_saved_tensors, run.start))
    run.layout.load(run.start, parts_to_load)
    for extension in new_extensions:
        extension.begin()
        logger.info(f"{run.start.path} has no {extension.description}: it begins here.")
    unused_part_names = [name for name in saved_part_names if name not in parts]
    if unused_part_names:
        logger.info(
            f"{run.start.path} also holds {' and '.join(unused_part_names)}, which this run does "
            "not continue."
        )


def supersede_later_checkpoints(trainer: Trainer) -> None:
    """Rename the run's checkpoints after its first step: the next resume must not take them."""
    if trainer.run.resume_from is not None and trainer.strategy.rank == 0:
        mark_superseded(trainer.run.folder.checkpoints, step=trainer.state.step)


def log_first_step(trainer: Trainer) -> None:
    """Log the checkpoint and the step at which a resumed run or a branch starts."""
    run = trainer.run
    if run.start is None:
        return
    step = trainer.state.step
    if run.resume_from is None:  # the start is the parent's checkpoint
        path = str(run.start.path)
        logger.info(
            f"Branched from {path} at step {step}.",
            extra=event("branch", step=step, checkpoint=path),
        )
    else:
        logger.info(
            f"Resumed from {run.start.path} at step {step}.",
            extra=event("resume", step=step, checkpoint=run.start.path.name),
        )
    log_changes(run.config, run.start, world_size=trainer.strategy.world_size)
    if step == run.batch_plan.total_steps:
        logger.info(f"All {step:,} steps are already done: nothing is left to train.")
