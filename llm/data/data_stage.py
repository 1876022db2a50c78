"""A stage of a data mixture as a table of the TOML file, and which stages make no sequence."""

from collections.abc import Sequence

from llm.config.options import option, option_group
from llm.config.tokens import Tokens


@option_group("Stages of the data")
class DataStage:
    """Sources and weights from the end of the stage before: one table `[[data_stage]]`."""

    until: Tokens | None = option(
        None, "Tokens of the run after which the stage ends; none on the last."
    )
    data_path: tuple[float | str, ...] = option(
        (), "Its token files, as the option data_path takes them.", path=True
    )


def stage_problems(stages: Sequence[DataStage]) -> list[str]:
    """Return why the stages make no sequence, a sentence each."""
    problems = []
    begins = 0
    for number, stage in enumerate(stages, start=1):
        name, is_last = f"data_stage {number}", number == len(stages)
        if not stage.data_path:
            problems.append(f"{name} has no data_path; name its token files.")
        if stage.until is None and not is_last:
            problems.append(
                f"{name} has no until, which only the last stage leaves out; give the tokens "
                "after which it ends."
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
