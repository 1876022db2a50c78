"""The fit of L(N, D) to the ranked runs, and the best learning rate of each size."""

import dataclasses
import math
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from llm.config.shell import shell_line
from llm.tools.report.cell_text import format_count, format_short
from llm.tools.report.option_panels import Line, LossPanel, Point
from llm.tools.report.ranking import Group, Ranking

if TYPE_CHECKING:
    from llm.tools.report.scaling_law import Array, ScalingLaw

Pair = tuple[int, float]
"""Parameters of a model, and tokens that it was trained on."""

_CURVE_POINTS = 60
_MIN_FALL = 1e-4
"""Fall of the loss as a fraction of it, below which it does not depend on size or tokens."""
_LAW = "L(N, D) = E + A / N^alpha + B / D^beta"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScalingSection:
    """What the report says about runs of several sizes or lengths.

    Attributes:
        refusal: A sentence if the law is not fitted; empty otherwise.
        constants: The name, value and interval of each fitted constant.
        remarks: Sentences about the fit.
        panel: Measured and fitted losses; None without a fit.
        best_rates: For each size and number of tokens with several learning rates: size, tokens,
            best rate, its loss, and the rates that were tried.
    """

    refusal: str = ""
    constants: Sequence[tuple[str, str, str]] = ()
    remarks: Sequence[str] = ()
    panel: LossPanel | None = None
    best_rates: Sequence[tuple[str, str, str, str, str]] = ()


def make_scaling_section(ranking: Ranking) -> ScalingSection | None:
    """Fit the law to the ranked runs.

    Of runs of the same size and tokens, the fit takes the group with the lowest loss.

    Returns:
        The section; None if the runs have one size and one number of tokens.
    """
    groups_by_pair: dict[Pair, list[Group]] = {}
    for group in ranking.groups:  # by rising loss
        pair = _find_pair(group)
        if pair is not None:
            groups_by_pair.setdefault(pair, []).append(group)
    if len(groups_by_pair) < 2:
        return None
    section = _fit_section({pair: groups[0] for pair, groups in groups_by_pair.items()})
    return dataclasses.replace(section, best_rates=_make_rate_rows(groups_by_pair))


def _find_pair(group: Group) -> Pair | None:
    """Return size and tokens of a group; None if they are unknown, or its runs differ in them."""
    pairs = {(member.num_parameters, member.tokens) for member in group.members}
    size, tokens = min(pairs, key=repr)
    return (size, tokens) if len(pairs) == 1 and size and tokens else None


def _fit_section(group_by_pair: dict[Pair, Group]) -> ScalingSection:
    """Return the section with the fit, or with the reason why there is none."""
    try:
        from llm.tools.report.scaling_law import describe_fit_problem, fit_scaling_law
    except ImportError:
        install = shell_line([sys.executable, "-m", "pip", "install", "scipy"])
        return ScalingSection(
            refusal=f"The fit of {_LAW} needs the package scipy: run {install}; it is in the extra "
            "`report`."
        )
    runs = [
        (size, tokens, member)
        for (size, tokens), group in group_by_pair.items()
        for member in group.members
    ]
    sizes = np.array([size for size, _, _ in runs], dtype=np.float64)
    tokens = np.array([tokens for _, tokens, _ in runs])
    losses = np.array([member.loss for *_, member in runs])
    problem = describe_fit_problem(sizes, tokens)
    if problem is not None:
        return ScalingSection(refusal=f"{_LAW} is not fitted: {problem}")
    law = fit_scaling_law(sizes, tokens, losses)
    quantities = _find_quantities_without_effect(law, sizes, tokens, mean_loss=losses.mean())
    if quantities:
        return ScalingSection(
            refusal=f"{_LAW} is not fitted: with the {' and the '.join(quantities)}, the fitted "
            "loss does not fall by more than the residuals."
        )
    return ScalingSection(
        constants=_format_constants(law),
        remarks=_describe_fit(law, num_pairs=len(group_by_pair)),
        panel=_make_panel(law, group_by_pair),
    )


def _find_quantities_without_effect(
    law: "ScalingLaw", sizes: "Array", tokens: "Array", *, mean_loss: float
) -> list[str]:
    """Return whether the loss hardly depends on the size or the tokens, as a list of their names.

    The exponent of such a quantity and the best ratio have no meaning.
    """
    loss_of_smallest, loss_of_largest = (
        law.predict(size, tokens[:1]) for size in (sizes.min(), sizes.max())
    )
    loss_of_fewest, loss_of_most = law.predict(sizes[0], np.array([tokens.min(), tokens.max()]))
    falls = {
        "size": float(loss_of_smallest[0] - loss_of_largest[0]),
        "number of tokens": float(loss_of_fewest - loss_of_most),
    }
    min_fall = max(law.deviation, _MIN_FALL) * mean_loss
    return [name for name, fall in falls.items() if fall < min_fall]


def _format_constants(law: "ScalingLaw") -> list[tuple[str, str, str]]:
    """Return the name, value and interval of each fitted constant."""
    rows = []
    for name in ("E", "A", "B", "alpha", "beta", "a", "b"):
        value, low, high = map(_format_constant, law.estimates[name])
        rows.append((name, value, f"{low} to {high}"))
    return rows


def _describe_fit(law: "ScalingLaw", *, num_pairs: int) -> list[str]:
    """Return the remarks on a fit to runs of several pairs of size and tokens."""
    from llm.tools.report.scaling_law import COVERAGE, NUM_RESAMPLES

    ratio, low, high = (f"{number:.3g}" for number in law.estimates["tokens_per_parameter"])
    return [
        f"{_LAW}, fitted to {law.num_points} runs of {num_pairs} pairs of N and D, "
        "the best options of each pair; the root mean square of the residuals is "
        f"{law.deviation:.2%}. N counts all parameters (of a mixture of experts, the active "
        "ones), and D the tokens seen.",
        f"The best size for a compute of C = 6 N D grows as C^a, and the tokens as C^b. At the "
        f"largest compute of these runs, {law.compute:.3g} FLOPs, the best ratio is {ratio} "
        f"tokens per parameter ({low} to {high}).",
        f"Intervals of {COVERAGE:.0%} by bootstrap over {NUM_RESAMPLES:,} samples of the runs. "
        "They do not tell whether the law holds beyond these sizes and lengths.",
        "Method: Hoffmann et al. (2022, arXiv 2203.15556), approach 3, as corrected by "
        "Besiroglu et al. (2024, arXiv 2404.10102).",
    ]


def _format_constant(value: float) -> str:
    return f"{value:,.0f}" if 1e3 <= value < 1e6 else f"{value:.4g}"


def _make_panel(law: "ScalingLaw", group_by_pair: Mapping[Pair, Group]) -> LossPanel:
    """Return the measured losses by tokens, and a curve of the fitted losses for each size."""
    lengths = [tokens for _, tokens in group_by_pair]
    curve_tokens = np.geomspace(min(lengths), max(lengths), _CURVE_POINTS)
    return LossPanel(
        name="scaling_law",
        title="Validation loss and fit",
        unit="tokens",
        log=True,
        points={
            member.run: Point(tokens, member.loss or math.nan)
            for (_, tokens), group in group_by_pair.items()
            for member in group.members
        },
        lines=[
            Line(
                format_short(size),
                [
                    Point(*point)
                    for point in zip(curve_tokens, law.predict(size, curve_tokens), strict=True)
                ],
            )
            for size in sorted({size for size, _ in group_by_pair})
        ],
    )


def _make_rate_rows(
    groups_by_pair: Mapping[Pair, Sequence[Group]],
) -> list[tuple[str, str, str, str, str]]:
    """Return a row for each size and length with several learning rates; see `ScalingSection`."""
    rows = []
    for (size, tokens), groups in sorted(groups_by_pair.items()):
        rates = [group.options.get("learning_rate") for group in groups]
        tried_rates = sorted({rate for rate in rates if isinstance(rate, float)})
        best_rate = rates[0]
        if len(tried_rates) < 2 or best_rate not in tried_rates:
            continue
        best_text = f"{best_rate:g}"
        if best_rate in (tried_rates[0], tried_rates[-1]):
            best_text += ", at the edge"
        tried_text = ", ".join(f"{rate:g}" for rate in tried_rates)
        loss = f"{groups[0].mean_loss:.4f}"
        rows.append((format_count(size), format_count(tokens), best_text, loss, tried_text))
    return rows


def format_scaling_section(section: ScalingSection) -> str:
    """Return the section as lines of text."""
    lines = [section.refusal] if section.refusal else []
    width = max((len(name) for name, *_ in section.constants), default=0)
    lines += [
        f"{name:<{width}}  {value}  ({interval})" for name, value, interval in section.constants
    ]
    lines += section.remarks
    lines += [
        f"best learning_rate of {size} parameters after {tokens} tokens: {rate} "
        f"(loss {loss}; tried {tried})"
        for size, tokens, rate, loss, tried in section.best_rates
    ]
    return "".join(f"{line}\n" for line in lines)
