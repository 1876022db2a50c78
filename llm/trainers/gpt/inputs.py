"""What a run reads before it starts: folder, checkpoint, tokenizer, data, arithmetic.

All of it runs before process groups form, so that bad input is refused by one sentence and no rank
waits for another that has given up, except that they verify a checkpoint together. Only the data
cache is written.
"""

import dataclasses
from pathlib import Path
from typing import Any

from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from llm.checkpoint.format import Checkpoint
from llm.checkpoint.run_folder import RunFolder, check_unchanged
from llm.checkpoint.verify import Verifiers
from llm.data.batch_plan import BatchPlan, plan_batches
from llm.data.corpus import Corpus, Samples, digest_of, hold_corpus_in_memory
from llm.data.open_corpus import open_corpus
from llm.data.order import DocumentEnds, document_ends
from llm.errors import ConfigError, DataError
from llm.models.configuration import find_weights, load_config, max_positions
from llm.models.mup import check_mup
from llm.optim.schedule import Schedule, make_schedule
from llm.parallel.accelerator import check_device, check_precision
from llm.parallel.dims import ParallelDims, parallel_dims
from llm.parallel.pipeline.pipeline_schedule import check_micro_batches
from llm.parallel.pipeline.stage import check_depth
from llm.parallel.tensor_plans import check_tensor_parallel
from llm.runtime.world import World, device_of
from llm.tokenizers.load_tokenizer import load_tokenizer
from llm.trainers.gpt.config import GPTConfig
from llm.trainers.gpt.evaluation import load_metrics
from llm.trainers.gpt.resume import (
    check_folder,
    check_same_attention,
    check_same_data,
    choose_by_device,
    choose_seed,
    find_init,
    find_resume,
)
from llm.trainers.gpt.strategies import Replicas, plan_replicas


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunSetup:
    """What a training and an evaluation read before they start.

    Attributes:
        run: The run's folder.
        resume_from: The checkpoint to resume from or to evaluate, or None.
        init_from: The checkpoint whose weights a new run starts from, or None.
        seed: The run's seed, drawn unless the options have one.
        by_device: Values of the options whose default depends on the device, by name.
        tokenizer: The tokenizer.
        model_config: The model's Hugging Face configuration.
        weights_from: Where pretrained weights come from, or None to start from scratch.
        block_size: Tokens of a sample.
        corpus: Training and validation tokens.
        ends: How to keep the documents of a sample apart; None lets attention cross them.
        metrics: Metrics of the evaluate library by name.
        layout: How the ranks divide one model and its data.
        replicas: The models that train side by side.
    """

    run: RunFolder
    resume_from: Checkpoint | None
    init_from: Checkpoint | None
    seed: int
    by_device: dict[str, Any]
    tokenizer: PreTrainedTokenizerBase
    model_config: PreTrainedConfig
    weights_from: str | None
    block_size: int
    corpus: Corpus
    ends: DocumentEnds | None
    metrics: dict[str, Any]
    layout: ParallelDims
    replicas: Replicas


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainSetup(RunSetup):
    """What a training reads besides.

    Attributes:
        data_digest: Digest of the training tokens.
        samples: The training samples.
        plan: Batch arithmetic.
        schedule: Learning rate by step.
    """

    data_digest: str
    samples: Samples
    plan: BatchPlan
    schedule: Schedule


def read_training(
    config: GPTConfig, world: World, *, config_file: Path | None = None
) -> TrainSetup:
    """Read everything that a run needs, and refuse what cannot work.

    Args:
        config: The options.
        world: Rank and world size of this process.
        config_file: The TOML file of `--config`.

    Raises:
        LLMError: In one sentence, what is wrong with an option or with the data.
    """
    run = _open_run(config, world)
    verifiers = Verifiers(rank=world.rank, world_size=world.world_size)
    resume_from = find_resume(config, run, verifiers=verifiers)
    check_folder(config, run, resume_from, config_file=config_file)
    setup = _read(config, world, run, resume_from, verifiers)
    if not setup.corpus.train:
        raise DataError(f"--split {config.split} leaves nothing to train on.")
    if config.save_top_k and not setup.corpus.validation:
        raise DataError(_nothing_to_evaluate_on("save_top_k"))
    data_digest = digest_of(setup.corpus.train)
    check_same_data(config, resume_from, data_digest)
    samples = Samples(setup.corpus.train, block_size=setup.block_size, seed=setup.seed)
    plan = _plan(config, samples.num_windows, setup.layout.data_ranks, resume_from)
    check_micro_batches(
        config.pipeline_schedule, ranks=setup.layout.pipeline, micro_batches=plan.accumulation
    )
    schedule = make_schedule(
        config, total_steps=plan.total_steps, global_batch_size=plan.global_batch_size
    )
    if config.in_memory and world.local_rank == 0:  # last, since this reads the whole corpus
        hold_corpus_in_memory(setup.corpus, training=True)
    return TrainSetup(
        **vars(setup), data_digest=data_digest, samples=samples, plan=plan, schedule=schedule
    )


def read_evaluation(config: GPTConfig, world: World) -> RunSetup:
    """Read everything that an evaluation needs, and refuse what cannot work.

    Raises:
        LLMError: In one sentence, what is wrong with an option or with the data.
    """
    run = _open_run(config, world)
    verifiers = Verifiers(rank=world.rank, world_size=world.world_size)
    setup = _read(config, world, run, find_resume(config, run, verifiers=verifiers), verifiers)
    if not (setup.weights_from or setup.resume_from):
        raise ConfigError(
            "--eval_only has no trained weights to evaluate: name a model with weights by "
            "--model_name_or_path, or a checkpoint by --resume_from_checkpoint."
        )
    if not setup.corpus.validation:
        raise DataError(_nothing_to_evaluate_on("eval_only"))
    if config.in_memory and world.local_rank == 0:
        hold_corpus_in_memory(setup.corpus, training=False)
    return setup


def _open_run(config: GPTConfig, world: World) -> RunFolder:
    """Return the run's folder, after the checks that read nothing."""
    check_device(device_of(world))
    _check_trackers(config)
    return RunFolder(Path(config.output_dir or _default_output_dir(config)))


def _read(
    config: GPTConfig,
    world: World,
    run: RunFolder,
    resume_from: Checkpoint | None,
    verifiers: Verifiers,
) -> RunSetup:
    # In the order of what they cost: wrong options are refused before text is tokenised.
    replicas = plan_replicas(config, world.world_size, resume_from)
    device = device_of(world)
    by_device = choose_by_device(config, resume_from, device)
    check_precision(dataclasses.replace(config, **by_device), device)
    metrics = load_metrics(config.eval_metrics)
    model_config = load_config(config)
    layout = choose_layout(config, model_config, world.world_size)
    block_size = choose_block_size(config, model_config)
    tokenizer = load_tokenizer(
        config,
        model_name_or_path=config.model_name_or_path,
        trust_remote_code=config.trust_remote_code,
    )
    ends = document_ends(config, eos_token_id=tokenizer.eos_token_id)
    init_from = find_init(config, verifiers=verifiers) if resume_from is None else None
    weights_from = None if resume_from or init_from else find_weights(config)
    check_mup(config, model_config, weights_from=weights_from)
    check_same_attention(config, init_from)
    return RunSetup(
        run=run,
        resume_from=resume_from,
        init_from=init_from,
        seed=choose_seed(config, resume_from),
        by_device=by_device,
        tokenizer=tokenizer,
        model_config=model_config,
        weights_from=weights_from,
        block_size=block_size,
        corpus=open_corpus(
            config,
            tokenizer=tokenizer,
            vocab_size=max(len(tokenizer), model_config.get_text_config().vocab_size),
            ends=ends,
            trust_remote_code=config.trust_remote_code,
        ),
        ends=ends,
        metrics=metrics,
        layout=layout,
        replicas=replicas,
    )


def _nothing_to_evaluate_on(option: str) -> str:
    return (
        f"--{option} has nothing to evaluate on; give --validation_file or a "
        "--validation_split_percentage above 0, or with token files --valid_data_path or a "
        "--split that has a second part."
    )


def choose_layout(
    config: GPTConfig, model_config: PreTrainedConfig, world_size: int
) -> ParallelDims:
    """Return how the ranks divide the model and its data.

    Raises:
        ConfigError: They cannot be divided so.
    """
    layout = parallel_dims(config, world_size)
    check_tensor_parallel(model_config, layout.tensor)
    if layout.pipeline > 1:
        num_layers = model_config.get_text_config().num_hidden_layers
        check_depth(num_layers, layout.pipeline * config.virtual_stages)
    return layout


def _check_trackers(config: GPTConfig) -> None:
    available = {str(tracker) for tracker in get_available_trackers()}
    for name in config.report_to:
        if name != "none" and name not in LOGGER_TYPE_TO_CLASS:
            raise ConfigError(
                f"--report_to {name} is no tracker; there are "
                f"{', '.join(sorted(LOGGER_TYPE_TO_CLASS))} and none."
            )
        if name != "none" and name not in available:
            raise ConfigError(
                f"--report_to {name} needs a package that is missing: pip install {name}."
            )


def _default_output_dir(config: GPTConfig) -> str:
    model = config.model_name_or_path or config.config_name or config.model_type or "gpt2"
    if config.model_size is not None:
        model = f"{Path(model).name}-{config.model_size}"
    text = config.dataset_name or config.train_file or config.validation_file
    if text is not None:
        data = Path(text).stem
    else:
        words = config.data_path or config.train_data_path or config.valid_data_path
        prefixes = [Path(word).name for word in words if isinstance(word, str)]
        # A prefix may contain dots: only the suffix of a flat file is removed.
        data = prefixes[0].removesuffix(".bin") if prefixes else "data"
        if len(prefixes) > 1:
            data += f"+{len(prefixes) - 1}"
    return str(Path("runs") / f"{Path(str(model)).name}-{data}")


def choose_block_size(config: GPTConfig, model_config: PreTrainedConfig) -> int:
    """Return the tokens of a sample.

    Raises:
        ConfigError: The model has fewer positions, or context parallelism cannot divide them.
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
    return size


def _plan(
    config: GPTConfig, num_windows: int, data_ranks: int, resume_from: Checkpoint | None
) -> BatchPlan:
    saved: int | None = None
    if resume_from is not None and "global_batch_size" not in config.change_on_resume:
        # The order of samples depends on it: on another number of ranks, accumulation changes.
        saved = int(resume_from.metadata["global_batch_size"])
        check_unchanged(
            {"global_batch_size": saved},
            {"global_batch_size": config.global_batch_size or saved},
            allowed=(),
        )
    return plan_batches(
        config, num_windows=num_windows, world_size=data_ranks, global_batch_size=saved
    )
