"""Knows which ranks of a job live and get on, by stores that rank 0 and each other rank keep.

Every rank sends a heartbeat with its progress to the board, a TCPStore of rank 0, twice a second;
rank 0 finds the ranks that make no progress within their limit. Every process also serves a store
of its own, which answers as long as the process lives, even while Python is blocked: the previous
rank polls it, and loses the connection as soon as the process dies. A rank that loses the board
knows that rank 0 has died. The failure is posted on the board and every rank ends itself, since the
collective that it waits for would time out only half an hour later, without a name.
"""

import contextlib
import faulthandler
import json
import logging
import math
import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

EXIT_PEER_LOST = 76
"""Exit code of a rank that ended because another one died or hung."""

Phase = Literal["start", "step", "evaluation", "save"]
_TIMES: dict[Phase, int] = {"start": 3, "step": 1, "evaluation": 1, "save": 3}
_BEAT_SECONDS = 0.5
_SILENT_SECONDS = 3.0
_END_SECONDS = 3.0
_LEAVE_SECONDS = 20.0
_CONNECT_SECONDS = 20.0
_POLL_SECONDS = 0.05

logger = logging.getLogger("llm")


class Board:
    """What the ranks of a job say of themselves, for all of them to read.

    A store is one connection: a thread that is held up there holds up the others that use it.

    Args:
        store: Where it is kept.
        rank: Of this process.
        world_size: Number of ranks.
    """

    def __init__(self, store: "Store", *, rank: int, world_size: int) -> None:
        self._store = store
        self._rank = rank
        self._ranks = range(world_size)

    def say(self, name: str, value: Any) -> None:
        """Say something for this rank."""
        self._store.set(f"{name}/{self._rank}", json.dumps(value))

    def heard(self, name: str) -> dict[int, Any]:
        """What has been said, by rank."""
        keys = [f"{name}/{rank}" for rank in self._ranks]
        if self._store.check(keys):
            return dict(enumerate(map(json.loads, self._store.multi_get(keys))))
        # A read of what is missing would block.
        said = {rank: self.heard_from(name, rank) for rank in self._ranks}
        return {rank: value for rank, value in said.items() if value is not None}

    def heard_from(self, name: str, rank: int) -> Any:
        """What one rank has said; None if it has not."""
        key = f"{name}/{rank}"
        return json.loads(self._store.get(key)) if self._store.check([key]) else None

    def wait(self, name: str, deadline: float, *, unless: str | None = None) -> bool:
        """Wait until every rank has said it; false once it is too late, or `unless` is posted."""
        keys = [f"{name}/{rank}" for rank in self._ranks]
        while time.monotonic() < deadline:
            if self._store.check(keys):
                return True
            if unless is not None and self.read(unless) is not None:
                return False
            time.sleep(_POLL_SECONDS)
        return False

    def post(self, key: str, text: str) -> None:
        """Tell all ranks something, unless it has been told already."""
        self._store.compare_set(key, "", text or "-")

    def read(self, key: str, deadline: float = -math.inf) -> str | None:
        """What was posted; None if nothing is until a deadline."""
        while not self._store.check([key]):
            if time.monotonic() > deadline:
                return None
            time.sleep(_POLL_SECONDS)
        text = self._store.get(key).decode()
        return "" if text == "-" else text


@dataclass
class _Peer:
    """What rank 0 knows of one rank: its last heartbeat, and when that came."""

    beat: dict[str, Any]
    heard: float

    @property
    def since(self) -> float:
        """When the rank last got on."""
        return float(self.heard - self.beat["age"])


class Health:
    """Watches over the ranks of one run, from threads of its own.

    Args:
        rank: Of this process.
        world_size: Number of ranks; one alone is not watched.
        timeout: Seconds that a rank may take for a step before it counts as hung; 0 for any number.
        share: Gives every rank the value that rank 0 has; called once.
        on_loss: Told the sentence, before this process ends itself.
        stacks: Folder for the Python stacks of all threads where a rank hangs, a file a rank.

    Attributes:
        failure: Which rank is lost, and why; None as long as none is.
        reporter: The rank that tells the world: 0, or 1 once rank 0 is the one that is lost.
    """

    def __init__(
        self,
        *,
        rank: int,
        world_size: int,
        timeout: float,
        share: Callable[[Any], Any],
        on_loss: Callable[[str], None],
        stacks: Path,
    ) -> None:
        self._rank, self._world_size = rank, world_size
        self._limits = {phase: times * (timeout or math.inf) for phase, times in _TIMES.items()}
        self._on_loss = on_loss
        self._stacks = stacks
        self._peers: dict[int, _Peer] = {}
        self._ended = threading.Event()
        self._ending = threading.Lock()
        self._attending: threading.Thread | None = None
        self.failure: str | None = None
        self.reporter = 0
        self.heartbeat(step=0, phase="start")
        if world_size == 1:
            return
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        self._own = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._host_0, port = share((socket.gethostname(), self._own.port))
        # The name of a host may mean nothing to others, and even nothing to itself.
        names = [os.environ.get("MASTER_ADDR", self._host_0), self._host_0]
        if self._host_0 == socket.gethostname():
            names.insert(0, "127.0.0.1")
        stores = [_connect(names, port) for _ in range(2)]
        if None in stores:
            missed = f"rank 0 on {self._host_0}, port {port}: if it hangs, nobody will say so."
            logger.warning(f"Rank {rank} does not reach {missed}")
            return
        board, other = (Board(s, rank=rank, world_size=world_size) for s in stores if s is not None)
        board.say("address", (_own_address(), self._own.port))
        self._heard = time.monotonic()
        self._attending = threading.Thread(target=self._attend, args=(board,), daemon=True)
        self._attending.start()
        if rank + 1 < world_size:
            threading.Thread(target=self._watch_next, args=(other,), daemon=True).start()
        if rank > 0:
            threading.Thread(target=self._watch_clock, daemon=True).start()
            with contextlib.suppress(RuntimeError):  # a death before it is watched goes unnoticed
                board.read(f"watched/{rank}", time.monotonic() + _CONNECT_SECONDS)

    def heartbeat(self, *, step: int, phase: Phase) -> None:
        """Say that this rank makes progress.

        Args:
            step: Optimizer steps done.
            phase: What it does next.
        """
        self._step, self._phase, self._since = step, phase, time.monotonic()

    def keep_alive(self) -> None:
        """Say that this rank makes progress within what it does."""
        self._since = time.monotonic()

    def close(self) -> None:
        """Leave in good order: the others go on, or are no longer watched if this is rank 0."""
        self._ended.set()
        if self._attending is not None:
            self._attending.join(_LEAVE_SECONDS)

    def wait_for_failure(self, seconds: float) -> str | None:
        """Why this process' communication failed, if another rank is the reason."""
        deadline = time.monotonic() + (0.0 if self._attending is None else seconds)
        while self.failure is None and (time.monotonic() < deadline or self._ending.locked()):
            time.sleep(_POLL_SECONDS)
        return self.failure

    def _attend(self, board: Board) -> None:
        """Beats, and hears what is posted, until this rank or rank 0 leaves, or one is lost."""
        first = None
        try:
            while True:
                leaves = self._ended.is_set() or board.read("closed") is not None
                self._beat(board, left=leaves)
                failure = None if leaves else board.read("verdict")
                # The board answers even while Python is blocked on rank 0; only beats stop.
                first, before = board.heard_from("beat", 0), first
                self._heard = self._heard if first == before else time.monotonic()
                if leaves or failure is not None:
                    break
                if self._rank == 0 and (hung := self._find_hung(board)) is not None:
                    board.post("verdict", hung)
                    continue
                self._ended.wait(_BEAT_SECONDS)
            if leaves:
                self._ended.set()
                if self._rank == 0:
                    board.post("closed", "")
            board.say("gone", True)
            if failure is not None:
                self._end(failure, board)
            elif self._rank == 0:  # the board goes with it
                board.wait("gone", time.monotonic() + _LEAVE_SECONDS)
        except RuntimeError:  # of the store
            if not self._ended.is_set():
                self.reporter = 1
                self._end(f"rank 0 on {self._host_0} has died, about step {self._step}")

    def _beat(self, board: Board, *, left: bool) -> None:
        beat = {
            "name": f"rank {self._rank} on {socket.gethostname()}",
            "step": self._step,
            "phase": self._phase,
            "age": time.monotonic() - self._since,
            "left": left,
        }
        board.say("beat", beat)

    def _watch_next(self, board: Board) -> None:
        """Ask the store of the next rank until its process dies."""
        rank = self._rank + 1
        with contextlib.suppress(RuntimeError):  # `_attend` finds out that rank 0 has died
            while (found := board.heard_from("address", rank)) is None:
                time.sleep(_POLL_SECONDS)
            host, port = found
            store = _connect([host], port)
            board.post(f"watched/{rank}", "")
            if store is None:
                missed = f"rank {rank} at {host}, port {port}: if it dies, nobody will say so."
                logger.warning(f"Rank {self._rank} does not reach {missed}")
                return
            with contextlib.suppress(RuntimeError):  # of a connection that has gone
                while True:
                    store.check(["alive"])  # waits where the process is stopped
                    time.sleep(_BEAT_SECONDS)
            last = board.heard_from("beat", rank) or {}
            if not last.get("left"):
                name, step = last.get("name", f"rank {rank} at {host}"), last.get("step", 0)
                board.post("verdict", f"{name} has died, about step {step}")

    def _watch_clock(self) -> None:
        """Notices a rank 0 that is blocked, also where `_attend`, which talks to it, is held up."""
        while not self._ended.wait(_BEAT_SECONDS):
            silent, limit = time.monotonic() - self._heard, self._limits[self._phase]
            if silent > max(limit, _SILENT_SECONDS):
                self.reporter = 1
                self._end(
                    f"rank 0 on {self._host_0} hangs: not heard of in {silent:.0f} s of a "
                    f"{self._phase} after step {self._step} (limit {limit:g} s)"
                )

    def _find_hung(self, board: Board) -> str | None:
        now = time.monotonic()
        for rank, beat in board.heard("beat").items():
            if rank not in self._peers or self._peers[rank].beat != beat:
                self._peers[rank] = _Peer(beat, now)
        peers = self._peers.values()
        late = [p for p in peers if now - p.since > self._limits[p.beat["phase"]]]
        if len(peers) < self._world_size or not late or any(p.beat["left"] for p in late):
            return None
        # One that was stopped says nothing, and was perhaps last heard of in another phase; one
        # that hangs has got less far than those that wait for it.
        silent = [p for p in peers if now - p.heard >= _SILENT_SECONDS and not p.beat["left"]]
        worst = min(silent or late, key=lambda peer: (peer.beat["step"], peer.since))
        limit = min(self._limits[peer.beat["phase"]] for peer in late)
        alike = not silent and all(p.beat["step"] == worst.beat["step"] for p in peers)
        who = "every rank" if alike else worst.beat["name"]
        return (
            f"{who} hangs: nothing in {now - worst.since:.0f} s of its {worst.beat['phase']} after "
            f"step {worst.beat['step']} (limit {limit:g} s)"
        )

    def _end(self, failure: str, board: Board | None = None) -> None:
        if not self._ending.acquire(blocking=False):
            return
        logger.error(f"error: {failure}; this rank {self._rank} ends too.")
        try:
            with contextlib.suppress(OSError):  # nothing shall keep this process from ending
                self._on_loss(failure)
                if " hangs: " in failure:  # also where another rank has found it
                    self._dump_stacks(failure)
            if self._rank == 0 and board is not None:  # the board goes with it
                deadline, others = time.monotonic() + _SILENT_SECONDS, self._world_size - 1
                with contextlib.suppress(RuntimeError):
                    while len(board.heard("gone")) < others and time.monotonic() < deadline:
                        time.sleep(_POLL_SECONDS)
        finally:
            self.failure = failure  # the thread that trains may end the process from here on
            # Long enough for it to end by itself if it can.
            if not self._ended.wait(_END_SECONDS):
                os._exit(EXIT_PEER_LOST)

    def _dump_stacks(self, failure: str) -> None:
        self._stacks.mkdir(parents=True, exist_ok=True)
        with (self._stacks / f"rank_{self._rank:05d}.txt").open("w", encoding="utf-8") as file:
            file.write(f"{failure}\n\n")
            file.flush()
            faulthandler.dump_traceback(file)


def _connect(names: list[str], port: int) -> Any:
    """A connection to a store by the first name of its host that leads there; None if none does."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    for name in names:
        with contextlib.suppress(RuntimeError):
            return TCPStore(
                name, port, wait_for_workers=False, timeout=timedelta(seconds=_CONNECT_SECONDS)
            )
    return None


def _own_address() -> str:
    """The address of this host on the network that leads to rank 0."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((os.environ.get("MASTER_ADDR", "127.0.0.1"), 9))  # sends nothing
        except OSError:
            return socket.gethostname()
        address: str = probe.getsockname()[0]
        return address
