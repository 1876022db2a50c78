"""How far training has come: all that a checkpoint must know besides the weights."""

import dataclasses
from typing import Any


@dataclasses.dataclass(kw_only=True)
class TrainState:
    """Counters of a run.

    Attributes:
        step: Optimizer steps done, skipped ones included. It is the data position too.
        samples: Samples consumed by all ranks.
        tokens: Tokens predicted by all ranks.
        seconds: Time spent training, over all starts of the run.
        best_loss: Lowest validation loss so far.
    """

    step: int = 0
    samples: int = 0
    tokens: int = 0
    seconds: float = 0.0
    best_loss: float | None = None

    def advance(self, *, samples: int, tokens: int) -> None:
        """Count one optimizer step."""
        self.step += 1
        self.samples += samples
        self.tokens += tokens

    def state_dict(self) -> dict[str, Any]:
        """The counters as plain values."""
        return dataclasses.asdict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over the counters of `state_dict`."""
        for field in dataclasses.fields(self):
            setattr(self, field.name, state[field.name])
