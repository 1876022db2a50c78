"""Final loss of gossip and DiLoCo against all-reduce, each at its best learning rate."""

import statistics
import sys
from collections.abc import Sequence

from benchmarks.report import Section, table
from benchmarks.simulated_ranks import Setting, train

_MOST_EXTENSIONS = 3


class Losses:
    """Trains by methods at rates from seeds, and remembers what came out.

    Args:
        setting: What all trainings have in common.
    """

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        self._found: dict[tuple[str, float, int], tuple[float, float]] = {}

    def of(self, method: str, rate: float, seed: int) -> tuple[float, float]:
        """Validation loss and distance from the mean; trains at most once."""
        key = method, rate, seed
        if key not in self._found:
            self._found[key] = train(self._setting, method, learning_rate=rate, seed=seed)
            loss, distance = self._found[key]
            print(
                f"{method} at {rate:g} from seed {seed}: {loss:.4f} (distance {distance:.2g})",
                file=sys.stderr,
                flush=True,
            )
        return self._found[key]

    def tune(self, method: str, rates: Sequence[float]) -> tuple[float, dict[float, float]]:
        """The best rate of seed 0, and the losses by rate.

        Rates are doubled or halved beyond the given ones until the best one is not the last.
        """
        losses = {rate: self.of(method, rate, 0)[0] for rate in sorted(rates)}
        for _ in range(_MOST_EXTENSIONS):
            best = min(losses, key=losses.__getitem__)
            if best == max(losses):
                further = 2 * best
            elif best == min(losses):
                further = best / 2
            else:
                break
            losses[further] = self.of(method, further, 0)[0]
        return min(losses, key=losses.__getitem__), losses


def loss_section(
    setting: Setting, methods: Sequence[str], rates: Sequence[float], seeds: int
) -> Section:
    """Tune each method, train the other seeds at its rate, and compare.

    Args:
        setting: What all trainings have in common.
        methods: `allreduce` first.
        rates: Learning rates to begin with.
        seeds: Trainings of each method at its rate; the first one has been tuned with.
    """
    losses = Losses(setting)
    rows, tuning, means = [], [], {}
    for method in methods:
        rate, by_rate = losses.tune(method, rates)
        runs = [losses.of(method, rate, seed) for seed in range(seeds)]
        finals = [loss for loss, _ in runs]
        means[method] = statistics.fmean(finals)
        rows.append(
            [
                method,
                f"{rate:g}",
                f"{means[method]:.4f} ({min(finals):.4f}-{max(finals):.4f})",
                f"{means[method] - means['allreduce']:+.4f}",
                f"{statistics.fmean(distance for _, distance in runs):.2g}",
            ]
        )
        tried = ", ".join(f"{loss:.4f} at {rate:g}" for rate, loss in sorted(by_rate.items()))
        tuning.append(f"- {method}: {tried}")
    tokens = setting.batch_size * setting.block_size
    lines = [
        f"GPT-Neo of {setting.layers} layers, width {setting.width}, on characters; "
        f"{setting.ranks} simulated ranks in nodes of {setting.ranks_per_node}, {tokens:,} "
        f"characters a step over all of them, {setting.steps} steps. Gossip by AccumAdamW with "
        f"moments of {setting.accum_steps} steps, or by AdamW where the name says so; DiLoCo with "
        f"{setting.sync_every} inner steps. Means of {seeds} seeds, smallest and largest in "
        "brackets.",
        "",
        *table(
            ("method", "best rate", "final validation loss", "to allreduce", "distance from mean"),
            rows,
        ),
        "",
        "Validation loss of the seed that chose the rate:",
        "",
        *tuning,
    ]
    return Section(title="Final loss", lines=lines)
