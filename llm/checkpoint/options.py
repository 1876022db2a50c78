"""Options of the run's folder and of checkpoints."""

from llm.config.duration import Duration
from llm.config.options import option, option_group


@option_group("Output and checkpoints")
class CheckpointOptions:
    """Where a run writes, when it saves, and what it resumes from."""

    output_dir: str | None = option(
        None, "Folder of the run; by default runs/MODEL-DATA.", path=True
    )
    overwrite_output_dir: bool = option(
        False, "Remove the run in output_dir and start again.", one_shot=True
    )
    save_interval: Duration | None = option(
        None,
        "Steps, tokens or epochs between checkpoints; by default never.",
        units={"steps": "checkpointing_steps", "tokens": "checkpointing_tokens", "epochs": ""},
        at_least=1,
    )
    checkpointing_minutes: float | None = option(
        None,
        "Also save this many minutes after the last checkpoint.",
        above=0,
    )
    keep_checkpoints: int | None = option(
        None,
        "Newest checkpoints to keep; by default all.",
        requires=("save_interval", "checkpointing_minutes"),
        at_least=1,
    )
    save_top_k: int = option(
        0,
        "Also keep this many checkpoints with the lowest validation loss, and a link `best`; saves "
        "evaluate first.",
        requires=("save_interval", "checkpointing_minutes"),
        at_least=0,
        needs_validation=True,
    )
    keep_every: int | None = option(
        None,
        "Steps between further checkpoints, which are never removed.",
        requires=("keep_checkpoints", "save_top_k"),
        at_least=1,
    )
    async_checkpoint: bool = option(
        True,
        "Write checkpoints in the background, from a copy in host memory.",
    )
    stage_checkpoints: str | None = option(
        None,
        "Folder on each node, such as '$TMPDIR', for checkpoints that are then copied to "
        "output_dir in the background.",
        path=True,
        requires=("save_interval", "checkpointing_minutes"),
    )
    resume_from_checkpoint: bool | str = option(
        False,
        "Resume from the newest valid checkpoint in output_dir, if any, or from this path.",
        one_shot=True,
        path=True,
    )
    change_on_resume: tuple[str, ...] = option(
        (),
        "Options to change that a resume must otherwise keep.",
        one_shot=True,
    )
    init_from: str | None = option(
        None,
        "Start with another run's weights: RUN (its newest checkpoint), RUN/STEP or RUN/best.",
        path=True,
        resume="fixed",
    )
    branch_from: str | None = option(
        None,
        "Start from another run's checkpoint, as for init_from, with its state and, by default, "
        "its options.",
        path=True,
        requires=("output_dir",),
    )


def checkpoint_problems(options: CheckpointOptions) -> list[str]:
    """Return faults of the checkpoint options, one sentence each."""
    problems = []
    if options.resume_from_checkpoint and options.overwrite_output_dir:
        problems.append(
            "--resume_from_checkpoint keeps the run and --overwrite_output_dir removes it; "
            "give one of them."
        )
    return problems
