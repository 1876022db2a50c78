"""Ranks that verify a checkpoint together: each reads a share of its files, all learn the verdict.

This happens before process groups form, so they exchange verdicts through the launcher's store.
"""

import functools
import os
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING

from llm.errors import ParallelError

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

_SECONDS = 3600.0  # to wait for the slowest rank
_POLL_SECONDS = 0.02


class Verifiers:
    """The ranks of a run; every rank makes one and calls its methods in the same order.

    Args:
        rank: Rank of this process.
        world_size: Number of ranks.
    """

    def __init__(self, *, rank: int = 0, world_size: int = 1) -> None:
        self._rank, self._world_size = rank, world_size
        self._exchanges = 0

    def share(self, files: Mapping[str, tuple[int, str]]) -> set[str]:
        """Return the files that this rank reads; each file has one rank.

        Args:
            files: Size in bytes and checksum of each file.
        """
        loads = [0] * self._world_size
        own = set()
        for name, (size, _) in sorted(files.items(), key=lambda item: (-item[1][0], item[0])):
            reader = min(range(self._world_size), key=loads.__getitem__)
            loads[reader] += size
            if reader == self._rank:
                own.add(name)
        return own

    def verdict(self, problem: str | None) -> str | None:
        """Return the problem of any rank, the same on all of them; None if none has one.

        Raises:
            ParallelError: Ranks are missing.
        """
        if self._world_size == 1:
            return problem
        key, store = self._next_key(), _launch_store()
        if problem is not None:
            store.compare_set(f"{key}/problem", "", problem)
        self._count(f"{key}/verified")
        self._wait_for(f"{key}/verified/all")
        found = None
        if store.check([f"{key}/problem"]):
            found = store.get(f"{key}/problem").decode()
        self._count(f"{key}/read")
        if self._rank == 0:  # it may serve the store, and end because of the verdict
            self._wait_for(f"{key}/read/all")
        return found

    def check_same(self, value: str, what: str) -> None:
        """Refuse a value that differs between ranks.

        Args:
            value: This rank's.
            what: Its name in the error.

        Raises:
            ParallelError: On all ranks, if one has another value than rank 0.
        """
        if self._world_size == 1:
            return
        key, store = self._next_key(), _launch_store()
        if self._rank == 0:
            store.set(f"{key}/value", value)
        self._wait_for(f"{key}/value")
        differs = store.get(f"{key}/value").decode() != value
        problem = self.verdict(f"Rank {self._rank}" if differs else None)
        if problem is not None:
            raise ParallelError(
                f"{problem} sees other {what} than rank 0: the folder is not the same on all "
                "nodes, or shows an older state there; start again, and if that does not help, "
                "move it to a file system that all nodes share."
            )

    def _next_key(self) -> str:
        self._exchanges += 1
        restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # torchrun may keep its store
        return f"llm/verify/{restart}/{self._exchanges}"

    def _count(self, key: str) -> None:
        if _launch_store().add(key, 1) == self._world_size:
            _launch_store().set(f"{key}/all", "")

    def _wait_for(self, key: str) -> None:
        deadline = time.monotonic() + _SECONDS
        while not _launch_store().check([key]):
            if time.monotonic() > deadline:
                raise ParallelError(
                    f"Not all {self._world_size} ranks have verified the checkpoint within "
                    f"{_SECONDS:g} s; look for one that has ended, or sees another folder."
                )
            time.sleep(_POLL_SECONDS)


@functools.cache
def _launch_store() -> "Store":
    """Return the store by which process groups form later; rank 0 or torchrun serves it.

    It is kept as long as the process lives: rank 0 would end the store that it serves, to which
    faster ranks may have connected again to form the process groups.
    """
    from torch.distributed.rendezvous import rendezvous

    seconds = timedelta(seconds=_SECONDS)
    store: Store = next(iter(rendezvous("env://", timeout=seconds)))[0]
    return store


ALONE = Verifiers()
