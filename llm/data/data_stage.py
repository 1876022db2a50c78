"""A stage of a data mixture as a table of the TOML file, and checks of their sequence."""

from collections.abc import Sequence

from llm.config.options import option, option_group
from llm.config.tokens import Tokens


@option_group("Stages of the data")
class DataStage:
    """One mixture stage, which begins when the previous one ends: one table `[[data_stage]]`."""

    until: Tokens | None = option(
        None, "Tokens of the run when the stage ends; none for the last stage."
    )
    data_path: tuple[float | str, ...] = option(
        (), "Its token files, in the notation of data_path.", path=True
    )


def stage_problems(stages: Sequence[DataStage]) -> list[str]:
    """Return the faults in the sequence of stages, one sentence each."""
    problems = []
    begins = 0
    for number, stage in enumerate(stages, start=1):
        name, is_last = f"data_stage {number}", number == len(stages)
        if not stage.data_path:
            problems.append(f"{name} has no data_path; name its token files.")
        if stage.until is None and not is_last:
            problems.append(
                f"{name} has no until, which only the last stage leaves out; give the tokens at "
                "its end."
            )
        elif stage.until is not None and is_last:
            problems.append(
                f"{name} is the last stage and lasts to the end of the run; leave out its until = "
                f"{stage.until}."
            )
        elif stage.until is not None and stage.until <= begins:
            problems.append(
                f"{name} ends at {stage.until:,} tokens and begins at {begins:,}; give the stages "
                "in the order of their until."
            )
        begins = stage.until or begins
    return problems
