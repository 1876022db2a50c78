"""The board on which ranks tell one another how they are: values in a TCPStore of rank 0."""

import contextlib
import json
import math
import os
import socket
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

CONNECT_SECONDS = 20.0
POLL_SECONDS = 0.05


class Board:
    """Values that each rank publishes in a store and every rank can read."""

    def __init__(self, store: "Store", *, rank: int, world_size: int) -> None:
        self._store = store
        self._rank = rank
        self._ranks = range(world_size)

    def say(self, name: str, value: Any) -> None:
        """Publish a value of this rank."""
        self._store.set(f"{name}/{self._rank}", json.dumps(value))

    def heard(self, name: str) -> dict[int, Any]:
        """Return the values that ranks have published, by rank."""
        keys = [f"{name}/{rank}" for rank in self._ranks]
        if self._store.check(keys):
            return dict(enumerate(map(json.loads, self._store.multi_get(keys))))
        # Reading a missing key blocks.
        values = {rank: self.heard_from(name, rank) for rank in self._ranks}
        return {rank: value for rank, value in values.items() if value is not None}

    def heard_from(self, name: str, rank: int) -> Any:
        """Return the value of one rank; None if it has not published one."""
        key = f"{name}/{rank}"
        return json.loads(self._store.get(key)) if self._store.check([key]) else None

    def wait(self, name: str, deadline: float, *, unless: str | None = None) -> bool:
        """Wait for all ranks' values; false after the deadline, or once `unless` is posted."""
        keys = [f"{name}/{rank}" for rank in self._ranks]
        while time.monotonic() < deadline:
            if self._store.check(keys):
                return True
            if unless is not None and self.read(unless) is not None:
                return False
            time.sleep(POLL_SECONDS)
        return False

    def post(self, key: str, text: str) -> None:
        """Write a text for all ranks, unless one is there already."""
        self._store.compare_set(key, "", text or "-")

    def read(self, key: str, deadline: float = -math.inf) -> str | None:
        """Return what was posted; None if nothing was until the deadline."""
        while not self._store.check([key]):
            if time.monotonic() > deadline:
                return None
            time.sleep(POLL_SECONDS)
        text = self._store.get(key).decode()
        return "" if text == "-" else text


def connect(names: list[str], port: int) -> Any:
    """Connect to a store by the first of its host's names that works; None if none does."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    for name in names:
        with contextlib.suppress(RuntimeError):
            return TCPStore(
                name, port, wait_for_workers=False, timeout=timedelta(seconds=CONNECT_SECONDS)
            )
    return None


def own_address() -> str:
    """Return the address of this host on the network that leads to rank 0."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((os.environ.get("MASTER_ADDR", "127.0.0.1"), 9))  # UDP: sends nothing
        except OSError:
            return socket.gethostname()
        address: str = probe.getsockname()[0]
        return address
