"""What the ranks of a job say of themselves, and what follows from who is silent.

Ranks that wait for one another in a collective time out without a name. Here each says first where
it is and how far it has come, over a connection to rank 0 alone.
"""

import json
import os
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

from llm.launcher import hosts_of
from llm.runtime import World

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

STAGES = ("start", "connecting", "all-reduce", "broadcast", "done")
"""How far a rank has come in the communication that is tried."""

_POLL_SECONDS = 0.05


class Roll:
    """What the ranks say of themselves, kept by rank 0 for all of them to read.

    Args:
        store: Where it is kept.
        world: Which rank this is.
    """

    def __init__(self, store: "Store", world: World) -> None:
        self._store = store
        self._world = world

    def say(self, name: str, value: Any) -> None:
        """Say something for this rank."""
        self._store.set(f"{name}/{self._world.rank}", json.dumps(value))

    def heard(self, name: str) -> dict[int, Any]:
        """What has been said, by rank."""
        found = {}
        for rank in range(self._world.world_size):
            key = f"{name}/{rank}"
            if self._store.check([key]):  # a read of what is missing would block
                found[rank] = json.loads(self._store.get(key))
        return found

    def wait(self, name: str, deadline: float) -> bool:
        """Wait until every rank has said it; false once it is too late, or a rank has failed."""
        keys = [f"{name}/{rank}" for rank in range(self._world.world_size)]
        while time.monotonic() < deadline:
            if self._store.check(keys):
                return True
            if self._store.check(["failure"]) and name != "left":
                return False
            time.sleep(_POLL_SECONDS)
        return False

    def fail(self, sentence: str) -> None:
        """Say that this rank cannot go on, so that nobody waits for it."""
        self.say("failed", sentence)
        self._store.set("failure", "")

    def judge(self, part: str, verdict: str) -> None:
        """Rank 0 tells all what it has found; nothing to say is good."""
        self._store.set(f"verdict/{part}", verdict)

    def verdict(self, part: str, deadline: float) -> str | None:
        """What rank 0 has found; None if it does not say so in time."""
        key = f"verdict/{part}"
        while not self._store.check([key]):
            if time.monotonic() > deadline:
                return None
            time.sleep(_POLL_SECONDS)
        return self._store.get(key).decode()


def silent(here: dict[int, Any], world: World, timeout: float) -> str:
    """Says which ranks have not answered, and on which hosts they were to run."""
    missing = [rank for rank in range(world.world_size) if rank not in here]
    sentence = (
        f"{len(missing)} of {world.world_size} ranks have not answered within {timeout:g} s: "
        f"{', '.join(map(str, missing))}."
    )
    answers = Counter(_short(said["host"]) for said in here.values())
    hosts = hosts_of(os.environ)
    if not hosts:
        return f"{sentence} Answers came from {', '.join(answers)} only."
    each = world.world_size / len(hosts)
    lost = [host for host in hosts if answers[_short(host)] < each]
    return (
        f"{sentence} These hosts do not answer: {', '.join(lost)}. See whether Python starts "
        f"there, or leave them out (Slurm: --exclude={','.join(lost)})."
    )


def _short(host: str) -> str:
    return host.partition(".")[0]


def differences(here: dict[int, Any]) -> str:
    """Says in which versions and devices the ranks differ; empty if they do not."""
    found = []
    for name in sorted({name for said in here.values() for name in said["versions"]}):
        found.append(_difference(name, {r: s["versions"].get(name) for r, s in here.items()}))
    kinds = {rank: said["device"].partition(":")[0] for rank, said in here.items()}
    found.append(_difference("the kind of device", kinds))
    users: dict[str, list[int]] = {}
    for rank, said in here.items():
        if said["id"] is not None:
            users.setdefault(said["id"], []).append(rank)
    for ranks in users.values():
        if len(ranks) > 1:
            numbers = " and ".join(map(str, ranks))
            found.append(f"Ranks {numbers} share one device of {here[ranks[0]]['host']}.")
    return " ".join(filter(None, found))


def _difference(name: str, values: dict[int, Any]) -> str:
    if len(set(values.values())) == 1:
        return ""
    ranks_with: dict[Any, list[str]] = {}
    for rank, value in values.items():
        ranks_with.setdefault(value, []).append(str(rank))
    parts = [f"{value} on rank {', '.join(ranks)}" for value, ranks in ranks_with.items()]
    return f"The ranks differ in {name}: {'; '.join(parts)}."


def stuck(roll: Roll, timeout: float) -> str:
    """Says which ranks failed in the collectives, or keep the others waiting."""
    names = {rank: f"rank {rank} on {said['host']}" for rank, said in roll.heard("here").items()}
    failed = roll.heard("failed")
    if failed:
        return "; ".join(f"{names[rank]} fails: {why}" for rank, why in failed.items()) + "."
    stages = dict.fromkeys(names, STAGES[0]) | roll.heard("stage")
    first = min(STAGES.index(stage) for stage in stages.values())
    behind = [names[rank] for rank, stage in stages.items() if STAGES.index(stage) == first]
    what = f"within {timeout:g} s"
    if len(behind) < len(names):
        return f"{', '.join(behind)} did not get beyond {STAGES[first]} {what}; the others did."
    return (
        f"All ranks have answered, and none got beyond {STAGES[first]} {what}: they reach rank 0 "
        "and not one another. NCCL_DEBUG=INFO says which network interface is used, "
        "NCCL_SOCKET_IFNAME (GLOO_SOCKET_IFNAME without GPUs) chooses another."
    )
