"""What a checkpoint holds: the weights by name, and how far training has come."""

import dataclasses
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


@dataclasses.dataclass(kw_only=True)
class TrainState:
    """Counters of a run.

    Attributes:
        step: Optimizer steps done, skipped ones included. It is the data position too.
        samples: Samples consumed by all ranks.
        tokens: Tokens predicted by all ranks.
        seconds: Time spent training, over all starts of the run.
        best_loss: Lowest validation loss so far.
        evaluated_at: Step of the last evaluation.
        skipped_in_a_row: How many of the last steps were skipped.
    """

    step: int = 0
    samples: int = 0
    tokens: int = 0
    seconds: float = 0.0
    best_loss: float | None = None
    evaluated_at: int = 0
    skipped_in_a_row: int = 0

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
        # Older checkpoints lack some of the counters.
        state = {"evaluated_at": state["step"], "skipped_in_a_row": 0, **state}
        for field in dataclasses.fields(self):
            setattr(self, field.name, state[field.name])


def model_tensors(model: "torch.nn.Module") -> dict[str, "torch.Tensor"]:
    """Live parameters and persistent buffers; a tied parameter under its first name only."""
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    persistent = model.state_dict(keep_vars=True)
    buffers = {name: b for name, b in model.named_buffers() if name in persistent}
    return parameters | buffers
