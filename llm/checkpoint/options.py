"""Options of the run's folder and of checkpoints."""

from typing import Literal

from llm.config.options import option, option_group
from llm.config.tokens import Tokens


@option_group("Output and checkpoints")
class CheckpointOptions:
    """Where a run writes, when it saves, and what it resumes from."""

    output_dir: str | None = option(
        None, "Folder of the run; by default runs/MODEL-DATA.", path=True
    )
    overwrite_output_dir: bool = option(
        False, "Remove the run in output_dir and start again.", one_shot=True
    )
    checkpointing_steps: int | Literal["epoch"] | None = option(
        None,
        "Save a checkpoint every so many steps, or at the end of every `epoch`; by default never.",
        at_least=1,
    )
    checkpointing_tokens: Tokens | None = option(
        None,
        "Save a checkpoint after each step that completes so many tokens, in place of "
        "checkpointing_steps.",
        at_least=1,
    )
    checkpointing_minutes: float | None = option(
        None, "Save a checkpoint also when so many minutes have passed since the last one.", above=0
    )
    keep_checkpoints: int | None = option(
        None,
        "Keep this many of the newest checkpoints; by default all. Needs checkpointing_steps, "
        "checkpointing_tokens or checkpointing_minutes.",
        at_least=1,
    )
    save_top_k: int = option(
        0,
        "Keep also this many checkpoints of the lowest validation loss, with a link `best`; each "
        "checkpoint is then evaluated before it is saved. Needs checkpointing_steps, "
        "checkpointing_tokens or checkpointing_minutes.",
        at_least=0,
    )
    async_checkpoint: bool = option(
        True,
        "Continue training while a checkpoint is written; it takes as much host memory as this "
        "rank's share of weights and optimizer.",
    )
    resume_from_checkpoint: bool | str = option(
        False,
        "Resume from the newest valid checkpoint in output_dir, or from the one at this path. "
        "Without a checkpoint, the run starts from the beginning.",
        one_shot=True,
        path=True,
    )
    change_on_resume: tuple[str, ...] = option(
        (),
        "Fixed options that may differ from the resumed run.",
        one_shot=True,
    )
    init_from: str | None = option(
        None,
        "Start with the weights of another run's checkpoint: RUN (the newest), RUN/STEP or "
        "RUN/best. Optimizer, schedule and data start from the beginning.",
        path=True,
        resume="fixed",
    )
    branch_from: str | None = option(
        None,
        "Start a branch from another run's checkpoint: RUN (the newest), RUN/STEP or RUN/best. It "
        "takes weights, optimizer, counters, data position and all options that are not given "
        "from its parent. A resumed branch continues from its own checkpoints.",
        path=True,
        requires=("output_dir",),
    )


def checkpoint_problems(options: CheckpointOptions) -> list[str]:
    """Return what cannot work together, one sentence each."""
    problems = []
    if options.resume_from_checkpoint and options.overwrite_output_dir:
        problems.append(
            "--resume_from_checkpoint keeps the run and --overwrite_output_dir removes it; "
            "give one of them."
        )
    steps, tokens = options.checkpointing_steps, options.checkpointing_tokens
    if steps and tokens:
        problems.append(
            "--checkpointing_steps and --checkpointing_tokens exclude each other; give one of them."
        )
    if not (steps or tokens or options.checkpointing_minutes):
        problems += [
            f"--{name} needs --checkpointing_steps (or its form in tokens) or "
            "--checkpointing_minutes; give one of them too, or leave it out."
            for name in ("keep_checkpoints", "save_top_k")
            if getattr(options, name)
        ]
    return problems
