"""An extension that counts the updates of a run: the example in CONTRIBUTING.md."""

import logging
from typing import Any

from llm.config.options import option, option_group
from llm.trainers.gpt.seams import Extension, LoopExtension, Running


@option_group("Counter", extension=True)
class CounterOptions(Extension):
    """The counter of updates."""

    count_every: int | None = option(None, "Log the count so often.", at_least=1)

    def in_loop(self, running: Running) -> LoopExtension | None:
        return None if self.count_every is None else Counter(self.count_every)


class Counter(LoopExtension):
    part, description = "counter", "count of updates"

    def __init__(self, every: int) -> None:
        self.every, self.count = every, 0

    def after_update(self, batch: Any) -> None:
        self.count += 1
        if self.count % self.every == 0:
            logging.getLogger("llm").info(f"counted {self.count} updates")

    def begin(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]
