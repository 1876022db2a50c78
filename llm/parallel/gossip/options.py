"""Options of decentralised training."""

from dataclasses import dataclass
from typing import Literal

from llm.config.options import option

DECENTRALIZED = "Decentralised training"


@dataclass(frozen=True, kw_only=True)
class DecentralizedOptions:
    """Replicas with weights of their own."""

    data_parallel: Literal["allreduce", "gossip", "diloco"] = option(
        "allreduce",
        "How ranks train one model: with the mean gradient of all in each step; or each with "
        "weights of its own, averaged with a few other ranks in each step (gossip), or with all "
        "every inner_steps steps (diloco).",
        group=DECENTRALIZED,
        resume="fixed",
    )
    topology: Literal["complete", "exp", "ring", "alternating-exp-ring"] = option(
        "ring",
        "Which ranks average in which step of gossip; `python -m llm.parallel.topology` shows it.",
        group=DECENTRALIZED,
        requires=("data_parallel=gossip",),
        resume="fixed",
    )
    gossip_order: Literal["overlap", "blocking"] = option(
        "overlap",
        "Whether weights travel while the next gradient is computed, or each step waits for them.",
        group=DECENTRALIZED,
        requires=("data_parallel=gossip",),
        resume="fixed",
    )
    gossip_group: Literal["world", "nodes"] = option(
        "world",
        "What has weights of its own in gossip: each rank, or each node, whose ranks share their "
        "gradients.",
        group=DECENTRALIZED,
        requires=("data_parallel=gossip",),
        resume="fixed",
    )
    inner_steps: int = option(
        500,
        "Steps that ranks train alone between two common steps of diloco.",
        group=DECENTRALIZED,
        renamed_from="sync_every",
        requires=("data_parallel=diloco",),
        at_least=1,
        resume="fixed",
    )
    outer_learning_rate: float = option(
        0.7,
        "Rate of diloco's common step.",
        group=DECENTRALIZED,
        requires=("data_parallel=diloco",),
        above=0,
        resume="fixed",
    )
    outer_momentum: float = option(
        0.9,
        "Nesterov momentum of diloco's common step.",
        group=DECENTRALIZED,
        requires=("data_parallel=diloco",),
        at_least=0,
        below=1,
        resume="fixed",
    )
