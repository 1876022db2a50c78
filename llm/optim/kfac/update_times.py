"""How long K-FAC's updates keep the host busy."""

import contextlib
import time
from collections import Counter
from collections.abc import Iterator
from typing import Literal

from torch import Tensor, tensor

Update = Literal["factor", "inv"]


class UpdateTimes:
    """Host time of the updates since the last report.

    Nothing waits for the device on its account. On a CPU this is the time that updates take. On a
    GPU it is the time that it takes to ask for them, with that of the decompositions, for whose
    results the host waits. It has no part in a run's state: a resumed run begins anew.
    """

    def __init__(self) -> None:
        self._seconds: Counter[Update] = Counter()
        self._updates: Counter[Update] = Counter()

    @contextlib.contextmanager
    def measure(self, update: Update) -> Iterator[None]:
        """Surround a part of a step's update."""
        began = time.perf_counter()
        yield
        self._seconds[update] += time.perf_counter() - began  # type: ignore[assignment]

    def end(self, update: Update) -> None:
        """Count a step's update, all parts of it."""
        self._updates[update] += 1

    def take(self) -> dict[str, Tensor]:
        """`factor_update_ms` and `inv_update_ms`: the mean of the steps that had such an update.

        One of which there was none since the last call is left out. Begins anew.
        """
        found = {
            f"{update}_update_ms": tensor(1000 * self._seconds[update] / number)
            for update, number in self._updates.items()
        }
        self._seconds.clear()
        self._updates.clear()
        return found
