"""The comparison of several runs in the report: ranking, panels of options, and scaling law."""

import dataclasses
from collections.abc import Sequence

from llm.tools.report.option_panels import LossPanel, make_option_panels
from llm.tools.report.ranking import Ranking, format_ranking, rank_runs
from llm.tools.report.runs import Run
from llm.tools.report.scaling_section import (
    ScalingSection,
    format_scaling_section,
    make_scaling_section,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
    """What the report says about several runs.

    Attributes:
        ranking: The runs by rising validation loss.
        option_panels: The loss against each option that differs.
        scaling: The fit of a scaling law; None for runs of one size and number of tokens.
    """

    ranking: Ranking
    option_panels: Sequence[LossPanel]
    scaling: ScalingSection | None

    @property
    def loss_panels(self) -> list[LossPanel]:
        """All panels of final losses."""
        fit = self.scaling.panel if self.scaling else None
        return [*self.option_panels, *([fit] if fit else [])]

    def describe(self) -> str:
        """Return the comparison as lines of text."""
        return format_ranking(self.ranking) + (
            format_scaling_section(self.scaling) if self.scaling else ""
        )


def compare_runs(runs: Sequence[Run]) -> Comparison | None:
    """Compare runs; None with fewer than two, or if none has finished with a validation loss."""
    ranking = rank_runs(runs)
    if ranking is None:
        return None
    return Comparison(
        ranking=ranking,
        option_panels=make_option_panels(ranking),
        scaling=make_scaling_section(ranking),
    )
