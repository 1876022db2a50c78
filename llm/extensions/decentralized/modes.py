"""The two ways to average replicas, gossip and DiLoCo, with their settings."""

from collections.abc import Sequence
from dataclasses import dataclass

from llm.extensions.decentralized.rounds import Round


@dataclass(frozen=True, kw_only=True)
class Gossip:
    """Average with a few replicas in each step.

    Attributes:
        rounds: The groups of replicas that average, round by round.
        overlap: Whether an exchange overlaps the next step.
    """

    rounds: Sequence[Round]
    overlap: bool = True


@dataclass(frozen=True, kw_only=True)
class DiLoCo:
    """Take a common step of all replicas every `inner_steps` steps.

    Attributes:
        inner_steps: Steps that replicas train alone between two outer steps (H).
        outer_learning_rate: Rate of an outer step; 1 without momentum is a plain mean.
        outer_momentum: Nesterov momentum of the outer steps.
    """

    inner_steps: int
    outer_learning_rate: float
    outer_momentum: float
