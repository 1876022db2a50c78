"""Inputs of a run, read before it starts."""

import dataclasses
from typing import Any

from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from llm.checkpoint.format import Checkpoint
from llm.checkpoint.run_folder import RunFolder
from llm.data.batch_plan import BatchPlan
from llm.data.corpus import Corpus, Samples
from llm.data.order import DocumentEnds
from llm.data.skipped_samples import SkippedSamples
from llm.optim.schedule import Schedule
from llm.parallel.dims import ParallelDims
from llm.tokenizers.load_tokenizer import fingerprint
from llm.trainers.gpt.branches import Branch
from llm.trainers.gpt.config import CoreConfig
from llm.trainers.gpt.layouts import Layout
from llm.trainers.gpt.resume import recorded_options


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunSetup:
    """Inputs of a training and an evaluation, read before they start.

    Attributes:
        run: The run's folder.
        resume_from: The checkpoint to resume from or to evaluate, or None.
        branch_from: The parent's checkpoint that a new branch starts from, or None.
        init_from: The checkpoint that gives a new run its weights, or None.
        seed: The run's seed, drawn unless the options have one.
        by_device: Values of the options with a default that depends on the device, by name.
        tokenizer: The tokenizer.
        model_config: The model's Hugging Face configuration.
        weights_from: Source of pretrained weights, or None to start from scratch.
        initial_weights: Source of the weights at step 0, also in a resumed run or a branch: such as
            `from gpt2`, or `random, seed 1`.
        block_size: Tokens of a sample.
        corpus: Training and validation tokens.
        ends: How to keep the documents of a sample apart; None ignores document boundaries.
        metrics: Metrics of the evaluate library by name.
        read_by: The objects that extensions have read, by their class of options.
        dims: How the ranks divide one model and its data.
        layout: How the ranks train.
    """

    run: RunFolder
    resume_from: Checkpoint | None
    branch_from: Checkpoint | None
    init_from: Checkpoint | None
    seed: int
    by_device: dict[str, Any]
    tokenizer: PreTrainedTokenizerBase
    model_config: PreTrainedConfig
    weights_from: str | None
    initial_weights: str
    block_size: int
    corpus: Corpus
    ends: DocumentEnds | None
    metrics: dict[str, Any]
    read_by: dict[type, Any]
    dims: ParallelDims
    layout: Layout

    @property
    def start(self) -> Checkpoint | None:
        """The checkpoint that training resumes from: the run's, or its parent's."""
        return self.resume_from or self.branch_from


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainSetup(RunSetup):
    """Further inputs of a training.

    Attributes:
        branch: The point where the run left its parent; None if it is not a branch.
        data_digest: Digests of the training tokens, from `data_digest.digest_of`.
        samples: The training samples.
        plan: Batch arithmetic.
        skipped: The samples to skip.
        schedule: Learning rate by step.
    """

    branch: Branch | None
    data_digest: dict[str, Any]
    samples: Samples
    plan: BatchPlan
    skipped: SkippedSamples
    schedule: Schedule


def resolve(config: CoreConfig, setup: TrainSetup) -> CoreConfig:
    """Return the options for `config.toml`, including the setup's choices."""
    return dataclasses.replace(
        config,
        seed=setup.seed,
        output_dir=str(setup.run.path),
        skip_samples=str(setup.skipped) or None,
        # RUN alone could be a later checkpoint if the branch starts again before its first save.
        branch_from=setup.branch.parent if setup.branch else None,
        per_device_train_batch_size=setup.plan.micro_batch_size,
        **setup.by_device,
    )


def checkpoint_metadata(config: CoreConfig, setup: TrainSetup) -> dict[str, Any]:
    """Return the information about the run in every checkpoint."""
    batch = config.global_batch_size  # with the user's units, for messages
    if batch is None and setup.start is not None and not config.change_on_resume:
        batch = setup.start.metadata.get("batch_option")
    return {
        **recorded_options(config),
        "global_batch_size": setup.plan.batch_schedule(setup.block_size),
        "batch_option": batch,
        "data": setup.data_digest,
        "tokenizer": fingerprint(setup.tokenizer),
        "initial_weights": setup.initial_weights,
        "skip_samples": str(setup.skipped),
        "branch": None if setup.branch is None else dataclasses.asdict(setup.branch),
        **setup.layout.metadata(),
    }
