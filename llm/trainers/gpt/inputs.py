"""Reads a run before it starts: folder, checkpoint, model, tokenizer, data, arithmetic.

All of it runs before process groups form, so that bad input is refused with one sentence. An error
on one rank ends all ranks. Only the data cache is written.
"""

import dataclasses
import os
from pathlib import Path

import torch
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from llm.checkpoint.format import Checkpoint
from llm.checkpoint.run_folder import RunFolder
from llm.checkpoint.staging import staging_root
from llm.config.options import fields
from llm.data.corpus import Corpus, Samples, pin_in_memory
from llm.data.data_digest import compute_corpus_digests
from llm.data.open_corpus import open_corpus
from llm.data.order import DocumentBoundaries, choose_document_boundaries
from llm.errors import ConfigError, DataError
from llm.metrics.prometheus import check_metrics_file
from llm.models.build import build_model
from llm.models.configuration import (
    check_no_layers_skipped,
    find_weights,
    max_positions,
)
from llm.parallel.accelerator import check_gpus_visible, check_precision
from llm.parallel.dims import ParallelDims, make_parallel_dims
from llm.parallel.expert_parallel import check_expert_parallel
from llm.parallel.pipeline.stage import check_num_stages
from llm.parallel.tensor_plans import check_sequence_parallel, check_tensor_parallel
from llm.runtime.agreement import on_rank0
from llm.runtime.world import World, device_of, ranks_per_node
from llm.trainers.gpt.branch import make_branch, validated_branch_parent
from llm.trainers.gpt.config import CoreConfig
from llm.trainers.gpt.evaluation import load_metrics
from llm.trainers.gpt.model_copies import log_config_changes, read_model_config, read_tokenizer
from llm.trainers.gpt.output_folder import check_output_folder, choose_default_output_dir
from llm.trainers.gpt.recorded_options import check_checkpoint_record
from llm.trainers.gpt.resume import check_same_data, find_resume_checkpoint, find_run_checkpoint
from llm.trainers.gpt.run_defaults import (
    choose_device_options,
    choose_loss_chunks,
    choose_seed,
    use_checkpoint_batch_size,
)
from llm.trainers.gpt.seams import Run, choose_layout, make_extensions
from llm.trainers.gpt.trackers import check_trackers
from llm.trainers.gpt.training_run import TrainingRun, plan_training

_DEFAULT_BLOCK_SIZE = 1024
"""Tokens of a sample if neither the options nor the model limit it."""


def read_training(
    config: CoreConfig, world: World, *, config_file: Path | None = None
) -> TrainingRun:
    """Read all inputs of a run, and refuse inputs that cannot work.

    Raises:
        LLMError: In one sentence, what is wrong with an option or with the data.
    """
    folder = _choose_folder(config, world)
    if config.metrics_file is not None and world.is_main:
        check_metrics_file(Path(config.metrics_file))
    if config.stage_checkpoints is not None:
        staging_root(config.stage_checkpoints)  # refuses a folder that this node lacks
    resume_from = find_resume_checkpoint(config, folder)
    config = use_checkpoint_batch_size(config, resume_from)
    branch_from = validated_branch_parent(config, resume_from)
    folder.check_usable()
    # By one rank, because it looks up every input; all refuse before text is tokenized.
    on_rank0(lambda: check_output_folder(config, folder, resume_from, config_file=config_file))
    run = _read_run(config, world, folder, resume_from=resume_from, branch_from=branch_from)
    _check_splits(config, run.corpus)
    data_digest = compute_corpus_digests(run.corpus.train)
    check_same_data(config, run.start, data_digest, is_branch=branch_from is not None)
    samples = Samples(
        run.corpus.train,
        stages=run.corpus.stages,
        block_size=run.block_size,
        seed=run.seed,
    )
    branch = make_branch(config, resume_from, branch_from)
    batch_plan, skipped, schedule = plan_training(run, samples, branch)
    if config.in_memory and world.local_rank == 0:  # last, because this reads the whole corpus
        pin_in_memory((*run.corpus.train, *run.corpus.validation))
    config = dataclasses.replace(
        run.config,
        skip_samples=str(skipped) or None,
        # RUN alone could be a later checkpoint if the branch starts again before its first save.
        branch_from=branch.parent if branch else None,
        per_device_train_batch_size=batch_plan.micro_batch_size,
    )
    return TrainingRun(
        **vars(run) | {"config": config},
        branch=branch,
        data_digest=data_digest,
        samples=samples,
        batch_plan=batch_plan,
        skipped=skipped,
        schedule=schedule,
    )


def _check_splits(config: CoreConfig, corpus: Corpus) -> None:
    """Refuse to train without training data, or without validation data that an option needs."""
    if not corpus.train:
        raise DataError(f"--split {config.split} leaves nothing to train on.")
    validation_options = [
        field.name
        for field in fields(type(config))
        if field.option.needs_validation and getattr(config, field.name)
    ]
    if validation_options and not corpus.validation:
        raise DataError(_missing_validation_message(*validation_options))


def read_evaluation(config: CoreConfig, world: World) -> Run:
    """Read all inputs of an evaluation, and refuse inputs that cannot work.

    Raises:
        LLMError: In one sentence, what is wrong with an option or with the data.
    """
    folder = _choose_folder(config, world)
    resume_from = find_resume_checkpoint(config, folder)
    folder.check_usable()
    run = _read_run(config, world, folder, resume_from=resume_from, branch_from=None)
    if not (run.weights_from or run.resume_from):
        raise ConfigError(
            "--eval_only has no trained weights to evaluate: name a model with weights by "
            "--model_name_or_path, or a checkpoint by --resume_from_checkpoint."
        )
    if not run.corpus.validation:
        raise DataError(_missing_validation_message("eval_only"))
    if config.in_memory and world.local_rank == 0:
        pin_in_memory(run.corpus.validation)
    return run


def _choose_folder(config: CoreConfig, world: World) -> RunFolder:
    """Run the checks that do not read data; return the run's folder."""
    check_gpus_visible(device_of(world))
    check_trackers(config)
    return RunFolder(Path(config.output_dir or choose_default_output_dir(config)))


def _read_run(
    config: CoreConfig,
    world: World,
    folder: RunFolder,
    *,
    resume_from: Checkpoint | None,
    branch_from: Checkpoint | None,
) -> Run:
    """Read the inputs that a training and an evaluation share."""
    # In order of cost: wrong options are refused before text is tokenized.
    start = resume_from or branch_from
    device, seed = device_of(world), choose_seed(config, start)
    config = dataclasses.replace(
        config,
        seed=seed,
        output_dir=str(folder.path),
        **choose_device_options(config, start, device),
    )
    extensions = make_extensions(config)
    layout = choose_layout(
        config,
        extensions,
        ranks=world.world_size,
        ranks_per_node=ranks_per_node(os.environ, world.world_size),
        start=start,
    )
    check_precision(config, device)
    metrics = load_metrics(config.eval_metrics)
    model_config = read_model_config(config, start)
    dims = choose_dims(config, model_config, world.world_size)
    block_size = choose_block_size(config, model_config)
    tokenizer = read_tokenizer(config, model_config, start)
    init_from = None if start else _find_initial_checkpoint(config, model_config)
    weights_from = None if start or init_from else find_weights(config)
    run = Run(
        config=config,
        world=world,
        folder=folder,
        resume_from=resume_from,
        branch_from=branch_from,
        init_from=init_from,
        model_config=model_config,
        weights_from=weights_from,
        initial_weights=_describe_initial_weights(start, init_from, weights_from, seed=seed),
        tokenizer=tokenizer,
        block_size=block_size,
        document_boundaries=choose_document_boundaries(config, eos_token_id=tokenizer.eos_token_id),
        metrics=metrics,
        dims=dims,
        layout=layout,
        extensions=extensions,
        loss_chunks=choose_loss_chunks(config, start, device),
        corpus=Corpus(train=(), validation=()),
    )
    for extension in extensions:
        extension.prepare_run(run)
    corpus = open_data(config, model_config, tokenizer, run.document_boundaries)
    return dataclasses.replace(run, corpus=corpus)


def open_data(
    config: CoreConfig,
    model_config: PreTrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
    document_boundaries: DocumentBoundaries | None,
) -> Corpus:
    """Open the training and validation tokens; text is tokenized first.

    Raises:
        LLMError: The data are missing, damaged, or do not fit the model.
    """
    return open_corpus(
        config,
        tokenizer=tokenizer,
        vocab_size=max(len(tokenizer), model_config.get_text_config().vocab_size),
        document_boundaries=document_boundaries,
        trust_remote_code=config.trust_remote_code,
    )


def _find_initial_checkpoint(
    config: CoreConfig, model_config: PreTrainedConfig
) -> Checkpoint | None:
    """Return the checkpoint of `--init_from`, and log how its model differs; None without one."""
    if config.init_from is None:
        return None
    checkpoint = find_run_checkpoint(config.init_from, option="init_from")
    check_checkpoint_record(config, checkpoint)
    log_config_changes(config, checkpoint, model_config)
    return checkpoint


def _describe_initial_weights(
    start: Checkpoint | None, init_from: Checkpoint | None, weights_from: str | None, *, seed: int
) -> str:
    """Describe the source of the weights at step 0, for the log and the model card."""
    if start is not None:
        return str(start.metadata["initial_weights"])
    if init_from is not None:
        path = init_from.path
        return f"from {path.parent / path.readlink() if path.is_symlink() else path}"
    return f"random, seed {seed}" if weights_from is None else f"from {weights_from}"


def _missing_validation_message(*option_names: str) -> str:
    flags = " and ".join(f"--{name}" for name in option_names)
    return (
        f"There is no validation data for {flags}; give "
        "--validation_file or a --validation_split_percentage above 0, or with token files "
        "--valid_data_path or a --split that has a second part."
    )


def choose_dims(
    config: CoreConfig, model_config: PreTrainedConfig, world_size: int
) -> ParallelDims:
    """Return how the options divide the model and its data over ranks, if the model allows it.

    Raises:
        ConfigError: The model or the ranks cannot be divided this way.
    """
    dims = make_parallel_dims(config, world_size)
    if world_size > 1:
        check_no_layers_skipped(model_config)
    check_tensor_parallel(model_config, dims.tensor)
    if config.sequence_parallel:
        check_sequence_parallel(model_config)
    if dims.pipeline > 1:
        num_layers = model_config.get_text_config().num_hidden_layers
        check_num_stages(num_layers, dims.pipeline * config.virtual_stages)
    if dims.expert > 1:
        meta_model = build_model(
            config,
            model_config,
            seed=0,
            device=torch.device("meta"),
            vocab_size=model_config.get_text_config().vocab_size,
        )
        check_expert_parallel(meta_model, dims)
    return dims


def choose_block_size(config: CoreConfig, model_config: PreTrainedConfig) -> int:
    """Return the number of tokens of a sample.

    Raises:
        ConfigError: The model has fewer positions, or context or sequence parallelism cannot divide
            the tokens.
    """
    num_positions = max_positions(model_config)
    block_size = config.block_size or min(_DEFAULT_BLOCK_SIZE, num_positions or _DEFAULT_BLOCK_SIZE)
    if num_positions is not None and block_size > num_positions:
        raise ConfigError(
            f"--block_size {block_size} is more than the {num_positions} positions of the "
            "model; make it smaller, or enlarge the model with --config_overrides."
        )
    context_ranks = config.context_parallel_size
    num_chunks = 2 * context_ranks
    if context_ranks > 1 and block_size % num_chunks:
        raise ConfigError(
            f"--block_size {block_size} cannot be cut into {num_chunks} equal chunks, two "
            f"for each rank of --context_parallel_size {context_ranks}; make it a multiple of "
            f"{num_chunks}."
        )
    tensor_ranks = config.tensor_parallel_size
    if config.sequence_parallel and block_size % tensor_ranks:
        raise ConfigError(
            f"--sequence_parallel cannot share --block_size {block_size} among {tensor_ranks} "
            f"ranks; make it a multiple of {tensor_ranks}."
        )
    return block_size
