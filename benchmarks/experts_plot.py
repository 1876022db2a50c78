"""Draw a report of `benchmarks.experts`: the loads over its runs, and their validation losses.

python -m benchmarks.experts_plot REPORT.md PICTURE.png
"""

import re
import sys
from collections.abc import Sequence
from pathlib import Path

_SPREAD = re.compile(r"([\d.]+) \(([\d.]+)-([\d.]+)\)")


def read_table(report: str, head: str) -> list[list[str]]:
    """Return the cells of the table whose head begins with a word, the head first."""
    lines = iter(report.splitlines())
    table = [next(line for line in lines if line.startswith(f"| {head} |"))]
    next(lines)
    for line in lines:
        if not line.startswith("|"):
            break
        table.append(line)
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table]


def read_spread(cell: str) -> tuple[float, float, float]:
    """Return the median, the smallest and the largest value of a cell."""
    match = _SPREAD.fullmatch(cell)
    if match is None:
        return float(cell), float(cell), float(cell)
    median, lowest, highest = map(float, match.groups())
    return median, lowest, highest


def main(argv: Sequence[str]) -> int:
    """Draw a panel of loads by step, and a panel of losses."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    report = Path(argv[0]).read_text(encoding="utf-8")
    (_, *names), *rows = read_table(report, "step")
    losses = {name: read_spread(loss) for name, loss, *_ in read_table(report, "balancing")[1:]}
    figure, (load_axis, loss_axis) = pyplot.subplots(1, 2, figsize=(10, 4.6), layout="constrained")
    steps = [int(step) for step, *_ in rows]
    for number, name in enumerate(names):
        spreads = [read_spread(row[number + 1]) for row in rows]
        medians, lowest, highest = zip(*spreads, strict=True)
        load_axis.plot(steps, medians, color=f"C{number}", label=name)
        load_axis.fill_between(steps, lowest, highest, color=f"C{number}", alpha=0.12, linewidth=0)
    for number, (name, (median, lowest_loss, highest_loss)) in enumerate(losses.items()):
        distances = [[median - lowest_loss], [highest_loss - median]]
        label = None if name in names else name
        loss_axis.errorbar(
            [median], [-number], xerr=distances, fmt="o", color=f"C{number}", capsize=3, label=label
        )
    load_axis.set_ylim(bottom=1)
    load_axis.set_xlabel("step")
    load_axis.set_ylabel("largest load, relative to the mean of its layer")
    loss_axis.set_yticks([])
    loss_axis.set_xlabel("validation loss at the end, nats a token")
    figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize="small")
    figure.savefig(argv[1], dpi=120)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
