"""Reads a run's inputs before it starts: folder, checkpoint, model, tokenizer, data, arithmetic.

All of it runs before process groups form, so that bad input is refused with one sentence. An error
on one rank ends all ranks. Only the data cache is written.

The options name the model's configuration and the tokenizer by path, and the files can change or
disappear. Each checkpoint has copies of both (`copy_model`), with which a resumed run or a branch
compares them.
"""

import copy
import dataclasses
import inspect
import json
import logging
import os
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.dynamic_module_utils import custom_object_save

from llm.checkpoint.format import MODEL_FOLDER, TOKENIZER_FOLDER, Checkpoint
from llm.checkpoint.run_folder import RunFolder, differences
from llm.config.options import fields
from llm.data.corpus import Samples, hold_in_memory
from llm.data.data_digest import digest_of
from llm.data.open_corpus import open_corpus
from llm.data.options import training_paths
from llm.data.order import choose_document_boundaries
from llm.errors import CheckpointError, ConfigError, DataError
from llm.models.configuration import (
    check_skipped_layers,
    find_weights,
    load_config,
    max_positions,
)
from llm.models.options import ARCHITECTURE
from llm.parallel.accelerator import check_device, check_precision
from llm.parallel.dims import ParallelDims, parallel_dims
from llm.parallel.pipeline.stage import check_depth
from llm.parallel.tensor_plans import check_sequence_parallel, check_tensor_parallel
from llm.runtime.files import temporary_folder
from llm.runtime.world import World, device_of, ranks_per_node
from llm.tokenizers.load_tokenizer import fingerprint
from llm.tokenizers.options import TOKENIZER_FILES
from llm.trainers.gpt.config import CoreConfig
from llm.trainers.gpt.evaluation import load_metrics
from llm.trainers.gpt.reporting import check_trackers
from llm.trainers.gpt.resume import (
    branch_of,
    check_folder,
    check_known,
    check_same_data,
    choose_by_device,
    choose_seed,
    find_parent,
    find_resume,
    find_start,
    keep_batch_size,
    named_changes,
)
from llm.trainers.gpt.run_setup import RunSetup, TrainSetup, plan_training
from llm.trainers.gpt.seams import Inputs, choose_layout, make_extensions
from llm.trainers.gpt.trained_model import generation_settings, tokenizer_of, with_copies

_COMPARED = {"model_type", "tie_word_embeddings"}
"""Fields to compare even if a model's class does not declare them."""

_NOT_COMPARED = {"use_cache", *inspect.signature(PreTrainedConfig).parameters} - _COMPARED
"""Fields that a model's class may declare but that do not change training."""

logger = logging.getLogger("llm")


def read_training(
    config: CoreConfig, world: World, *, config_file: Path | None = None
) -> TrainSetup:
    """Read all inputs of a run, and refuse inputs that cannot work.

    Args:
        config: The options.
        world: Rank and world size of this process.
        config_file: The TOML file of `--config`.

    Raises:
        LLMError: In one sentence, what is wrong with an option or with the data.
    """
    run = _open_run(config, world)
    resume_from = find_resume(config, run)
    config = keep_batch_size(config, resume_from)
    branch_from = find_parent(config, resume_from)
    check_folder(config, run, resume_from, config_file=config_file)
    setup = _read_inputs(config, world, run, resume_from, branch_from)
    if not setup.corpus.train:
        raise DataError(f"--split {config.split} leaves nothing to train on.")
    evaluating = [
        field.name
        for field in fields(type(config))
        if field.option.needs_validation and getattr(config, field.name)
    ]
    if evaluating and not setup.corpus.validation:
        raise DataError(_nothing_to_evaluate_on(*evaluating))
    data_digest = digest_of(setup.corpus.train)
    check_same_data(config, setup.start, data_digest, is_branch=branch_from is not None)
    samples = Samples(
        setup.corpus.train,
        stages=setup.corpus.stages,
        block_size=setup.block_size,
        seed=setup.seed,
    )
    branch = branch_of(config, resume_from, branch_from)
    plan, skipped, schedule = plan_training(config, setup, samples, branch)
    if config.in_memory and world.local_rank == 0:  # last, because this reads the whole corpus
        hold_in_memory((*setup.corpus.train, *setup.corpus.validation))
    return TrainSetup(
        **vars(setup),
        branch=branch,
        data_digest=data_digest,
        samples=samples,
        plan=plan,
        skipped=skipped,
        schedule=schedule,
    )


def read_evaluation(config: CoreConfig, world: World) -> RunSetup:
    """Read all inputs of an evaluation, and refuse inputs that cannot work.

    Raises:
        LLMError: In one sentence, what is wrong with an option or with the data.
    """
    run = _open_run(config, world)
    resume_from = find_resume(config, run)
    run.check_usable()
    setup = _read_inputs(config, world, run, resume_from, None)
    if not (setup.weights_from or setup.resume_from):
        raise ConfigError(
            "--eval_only has no trained weights to evaluate: name a model with weights by "
            "--model_name_or_path, or a checkpoint by --resume_from_checkpoint."
        )
    if not setup.corpus.validation:
        raise DataError(_nothing_to_evaluate_on("eval_only"))
    if config.in_memory and world.local_rank == 0:
        hold_in_memory(setup.corpus.validation)
    return setup


def _open_run(config: CoreConfig, world: World) -> RunFolder:
    """Run the checks that do not read data; return the run's folder."""
    check_device(device_of(world))
    check_trackers(config)
    return RunFolder(Path(config.output_dir or _default_output_dir(config)))


def _read_inputs(
    config: CoreConfig,
    world: World,
    run: RunFolder,
    resume_from: Checkpoint | None,
    branch_from: Checkpoint | None,
) -> RunSetup:
    # In order of cost: wrong options are refused before text is tokenized.
    start = resume_from or branch_from
    per_node = ranks_per_node(os.environ, world.world_size)
    device = device_of(world)
    by_device = choose_by_device(config, start, device)
    device_config = dataclasses.replace(config, **by_device)
    extensions = make_extensions(device_config)
    layout = choose_layout(
        config, extensions, ranks=world.world_size, ranks_per_node=per_node, start=start
    )
    check_precision(device_config, device)
    metrics = load_metrics(config.eval_metrics)
    model_config = read_model_config(config, start)
    dims = choose_dims(config, model_config, world.world_size)
    block_size = choose_block_size(config, model_config)
    tokenizer = read_tokenizer(config, start)
    document_boundaries = choose_document_boundaries(config, eos_token_id=tokenizer.eos_token_id)
    init_from = None if start else _find_weights_of_run(config, model_config)
    weights_from = None if start or init_from else find_weights(config)
    seed = choose_seed(config, start)
    inputs = Inputs(
        start=start,
        init_from=init_from,
        model_config=model_config,
        weights_from=weights_from,
        tokenizer=tokenizer,
        dims=dims,
    )
    for extension in extensions:
        extension.read(inputs)
    return RunSetup(
        run=run,
        resume_from=resume_from,
        branch_from=branch_from,
        init_from=init_from,
        seed=seed,
        by_device=by_device,
        tokenizer=tokenizer,
        model_config=model_config,
        weights_from=weights_from,
        initial_weights=_initial_weights(start, init_from, weights_from, seed=seed),
        block_size=block_size,
        corpus=open_corpus(
            config,
            tokenizer=tokenizer,
            vocab_size=max(len(tokenizer), model_config.get_text_config().vocab_size),
            document_boundaries=document_boundaries,
            trust_remote_code=config.trust_remote_code,
        ),
        document_boundaries=document_boundaries,
        metrics=metrics,
        extensions=extensions,
        dims=dims,
        layout=layout,
    )


def _find_weights_of_run(config: CoreConfig, model_config: PreTrainedConfig) -> Checkpoint | None:
    """Return the checkpoint of `--init_from`; None without the option."""
    if config.init_from is None:
        return None
    checkpoint = find_start(config.init_from, option="init_from")
    check_known(config, checkpoint)
    _log_other_model(config, checkpoint, model_config)
    return checkpoint


def _initial_weights(
    start: Checkpoint | None, init_from: Checkpoint | None, weights_from: str | None, *, seed: int
) -> str:
    """Describe the source of the weights at step 0, for the log and the model card."""
    if start is not None:
        return str(start.metadata["initial_weights"])
    if init_from is not None:
        path = init_from.path
        return f"from {path.parent / path.readlink() if path.is_symlink() else path}"
    return f"random, seed {seed}" if weights_from is None else f"from {weights_from}"


def _nothing_to_evaluate_on(*options: str) -> str:
    return (
        f"There is no validation data for {' and '.join(f'--{name}' for name in options)}; give "
        "--validation_file or a --validation_split_percentage above 0, or with token files "
        "--valid_data_path or a --split that has a second part."
    )


def choose_dims(
    config: CoreConfig, model_config: PreTrainedConfig, world_size: int
) -> ParallelDims:
    """Return the division of the model and its data over ranks.

    Raises:
        ConfigError: The ranks cannot be divided this way.
    """
    dims = parallel_dims(config, world_size)
    if world_size > 1:
        check_skipped_layers(model_config)
    check_tensor_parallel(model_config, dims.tensor)
    if config.sequence_parallel:
        check_sequence_parallel(model_config)
    if dims.pipeline > 1:
        num_layers = model_config.get_text_config().num_hidden_layers
        check_depth(num_layers, dims.pipeline * config.virtual_stages)
    return dims


def _default_output_dir(config: CoreConfig) -> str:
    model = config.model_name_or_path or config.config_name or config.model_type or "gpt2"
    if config.model_size is not None:
        model = f"{Path(model).name}-{config.model_size}"
    text = config.dataset_name or config.train_file or config.validation_file
    if text is not None:
        data = Path(text).stem
    else:
        values = training_paths(config) or config.valid_data_path
        prefixes = [Path(word).name for word in values if isinstance(word, str)]
        # A prefix may contain dots: remove only the suffix of a flat file.
        data = prefixes[0].removesuffix(".bin") if prefixes else "data"
        if len(prefixes) > 1:
            data += f"+{len(prefixes) - 1}"
    return str(Path("runs") / f"{Path(str(model)).name}-{data}")


def choose_block_size(config: CoreConfig, model_config: PreTrainedConfig) -> int:
    """Return the tokens of a sample.

    Raises:
        ConfigError: The model has fewer positions, or context or sequence parallelism cannot divide
            them.
    """
    positions = max_positions(model_config)
    size = config.block_size or min(1024, positions or 1024)
    if positions is not None and size > positions:
        raise ConfigError(
            f"--block_size {size} is more than the {positions} positions of the "
            "model; make it smaller, or enlarge the model with --config_overrides."
        )
    ranks = config.context_parallel_size
    if ranks > 1 and size % (2 * ranks):
        raise ConfigError(
            f"--block_size {size} cannot be cut into {2 * ranks} equal chunks, two for each rank "
            f"of --context_parallel_size {ranks}; make it a multiple of {2 * ranks}."
        )
    ranks = config.tensor_parallel_size
    if config.sequence_parallel and size % ranks:
        raise ConfigError(
            f"--sequence_parallel cannot share --block_size {size} among {ranks} ranks; make it a "
            f"multiple of {ranks}."
        )
    return size


def read_model_config(config: CoreConfig, start: Checkpoint | None) -> PreTrainedConfig:
    """Load the model's configuration, and compare it with the copy in a checkpoint.

    Args:
        config: The options, which name it.
        start: The checkpoint that the run starts from. If the options name nothing on this machine,
            its copy is returned.

    Raises:
        CheckpointError: The configuration has changed since the checkpoint was written.
        ConfigError: It cannot be loaded.
    """
    if start is None:
        return load_config(config)
    allowed = _is_change_allowed(config, ARCHITECTURE)
    name = config.config_name or config.model_name_or_path
    if name is not None and not Path(name).exists() and not allowed:
        logger.info(
            f"{name} is not a local path: the model's configuration is the copy in {start.path}."
        )
        return load_config(with_copies(config, start))
    current = load_config(config)
    changed = config_changes(config, start, current)
    if changed and not allowed:
        option_name = next(option for option in ARCHITECTURE if getattr(config, option) is not None)
        raise CheckpointError(
            f"The model's configuration has changed since {start.path} was written: "
            f"{'; '.join(changed)}. Restore it, or allow the change with --change_on_resume "
            f"{option_name}."
        )
    if changed:
        logger.info(f"The model's configuration changes: {'; '.join(changed)}.")
    return current


def _log_other_model(config: CoreConfig, init_from: Checkpoint, current: PreTrainedConfig) -> None:
    """Log how a new run's configuration differs from the run that provides its weights."""
    changed = config_changes(config, init_from, current)
    if changed:
        logger.info(
            f"The weights of {init_from.path} were trained in another configuration: "
            f"{'; '.join(changed)}."
        )


def config_changes(
    config: CoreConfig, checkpoint: Checkpoint, current: PreTrainedConfig
) -> list[str]:
    """Return a clause for each field that differs from the copy in a checkpoint."""
    saved = load_config(with_copies(config, checkpoint))
    # Built from all fields, like the copy: some classes then derive other values.
    rebuilt = type(current).from_dict(current.to_dict())
    # A field on only one side comes from another version of the library, or is never read.
    changed = differences(_model_fields(saved), _model_fields(rebuilt))
    # The model's Python code, if it comes from a folder.
    folder = config.config_name or config.model_name_or_path
    for path in sorted((checkpoint.path / MODEL_FOLDER).glob("*.py")):
        code_file = Path(folder or "", path.name)
        if folder and code_file.is_file() and code_file.read_bytes() != path.read_bytes():
            changed.append(f"{path.name} has another content")
    return changed


def _model_fields(config: PreTrainedConfig) -> dict[str, Any]:
    """Return the fields that affect a model, by name; `a.b` is field b of the inner object a."""
    bases = [base for base in type(config).__mro__ if issubclass(base, PreTrainedConfig)]
    declared = {name for base in bases for name in inspect.signature(base).parameters}
    fields: dict[str, Any] = {}
    for name, value in json.loads(config.to_json_string(use_diff=False)).items():
        inner = vars(config).get(name)  # attributes raise if layers may differ
        if name not in _COMPARED | (declared - _NOT_COMPARED):
            continue
        if isinstance(inner, PreTrainedConfig):
            fields |= {f"{name}.{key}": field for key, field in _model_fields(inner).items()}
        else:
            fields[name] = value
    return fields


def read_tokenizer(config: CoreConfig, start: Checkpoint | None) -> PreTrainedTokenizerBase:
    """Load the tokenizer, and compare it with the copy in a checkpoint.

    Args:
        config: The options, which name it.
        start: The checkpoint that the run starts from. If the options name nothing on this machine,
            its copy is returned.

    Raises:
        CheckpointError: It does not give the same ids as when the checkpoint was written.
        ConfigError: It cannot be loaded.
    """
    if start is None:
        return tokenizer_of(config)
    names = (*TOKENIZER_FILES, "model_name_or_path")
    option = next(option for option in names if getattr(config, option) is not None)
    files = [getattr(config, option)]
    if option == "vocab_file":
        files.append(config.merges_file)
    allowed = _is_change_allowed(config, names)
    if not all(Path(file).exists() for file in files) and not allowed:
        logger.info(f"{files[0]} is not a local path: the tokenizer is the copy in {start.path}.")
        return tokenizer_of(with_copies(config, start))
    tokenizer = tokenizer_of(config)
    ids = fingerprint(tokenizer)
    # Another version of the library may compute another fingerprint for the same tokenizer.
    changed = ids != start.metadata["tokenizer"] and ids != fingerprint(
        tokenizer_of(with_copies(config, start))
    )
    if allowed:
        comparison = "changes: it gives other ids than" if changed else "gives the same ids as"
        logger.info(f"The tokenizer {files[0]} {comparison} the copy in {start.path}.")
    elif changed:
        raise CheckpointError(
            f"The tokenizer {files[0]} gives other ids than the copy in {start.path}: it has "
            f"changed. Restore it, or allow the change with --change_on_resume {option}."
        )
    return tokenizer


def _is_change_allowed(config: CoreConfig, names: tuple[str, ...]) -> bool:
    """Return whether `change_on_resume` names one of these options."""
    return not set(names).isdisjoint(named_changes(config))


def copy_model(setup: RunSetup, model: PreTrainedModel) -> dict[str, bytes]:
    """Return a checkpoint's files of the model and the tokenizer, by path in the checkpoint.

    Args:
        setup: The run's model configuration, as its options describe it, and its tokenizer.
        model: The model, possibly with custom Python code.
    """
    with temporary_folder() as parent:
        folder = parent / MODEL_FOLDER
        folder.mkdir()
        config = copy.deepcopy(setup.model_config)
        config.name_or_path = ""
        for custom in (config, model):
            if custom.is_custom_code():
                custom_object_save(custom, folder, config=config)
        # Write every field: a later version of the library may have other defaults.
        config.to_json_file(folder / "config.json", use_diff=False)
        # The generation settings belong to the run's pretrained weights.
        if setup.weights_from is not None or generation_settings(setup.start) is not None:
            model.generation_config.save_pretrained(folder)
        setup.tokenizer.save_pretrained(parent / TOKENIZER_FOLDER)
        files = (path for path in sorted(parent.rglob("*")) if path.is_file())
        return {path.relative_to(parent).as_posix(): path.read_bytes() for path in files}
