"""An extension that counts the updates of a run: the example of docs/extend.md."""

import logging
from typing import Any

from llm.config.options import option, option_group
from llm.trainers.gpt.config import CoreConfig
from llm.trainers.gpt.seams import Extension, LoopContext, LoopExtension, Periodic

logger = logging.getLogger("llm")


@option_group("Counter", extension=True)
class CounterOptions(CoreConfig):
    """The counter of updates."""

    count_every: int | None = option(
        None, "Steps between two reports of the number of updates.", at_least=1
    )


class CounterExtension(Extension[CounterOptions]):
    """Counts the updates, if the option asks for it."""

    def find_problems(self) -> list[str]:
        if self.options.count_every is None or not self.options.eval_only:
            return []
        return ["--count_every counts updates, and --eval_only makes none; leave one of them out."]

    def make_loop_extension(self, context: LoopContext) -> LoopExtension | None:
        every = self.options.count_every
        return None if every is None else Counter(every)


class Counter(LoopExtension):
    """Counts the updates of all starts of a run."""

    part, description = "counter", "count of updates"

    def __init__(self, every: int) -> None:
        self._count = 0
        self.periodic = Periodic("counter", every, self._report_count)

    def after_step(self, step: int, batch: Any) -> None:
        self._count += 1

    def _report_count(self, step: int) -> dict[str, float]:
        logger.info(f"counted {self._count} updates")
        return {"updates": self._count}

    def begin(self) -> None:
        self._count = 0

    def state_dict(self) -> dict[str, Any]:
        return {"count": self._count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._count = state["count"]
