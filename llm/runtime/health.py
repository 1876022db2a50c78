"""Detects ranks that have died or hang, by a TCPStore on each rank.

Every rank writes a heartbeat with its progress to the board, a TCPStore of rank 0, twice a second;
rank 0 looks for ranks that make no progress within their limit. Every process also serves a store
of its own, which answers as long as the process lives, even while Python is blocked: the previous
rank polls it, and loses the connection as soon as the process dies. A rank that loses the board
knows that rank 0 has died. The failure is posted on the board and every rank exits: its collective
would time out half an hour later, without the name of the failed rank.
"""

import contextlib
import faulthandler
import logging
import math
import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from llm.runtime.board import CONNECT_SECONDS, POLL_SECONDS, Board, connect, own_address

EXIT_PEER_LOST = 76
"""Exit code of a rank that exits because another rank has died or hangs."""

Phase = Literal["start", "step", "evaluation", "save"]
_TIMES: dict[Phase, int] = {"start": 3, "step": 1, "evaluation": 1, "save": 3}
"""The limit of each phase, in timeouts."""
_BEAT_SECONDS = 0.5
_SILENT_SECONDS = 3.0  # without a heartbeat, after which a process counts as stopped
_END_SECONDS = 3.0  # for the training thread to exit by itself
_LEAVE_SECONDS = 20.0

logger = logging.getLogger("llm")


@dataclass
class _Peer:
    """The last heartbeat of a rank, and when rank 0 first read it."""

    beat: dict[str, Any]
    heard: float

    @property
    def since(self) -> float:
        """When the rank last made progress."""
        return float(self.heard - self.beat["age"])


class Health:
    """The watchdog of a run: threads that watch the other ranks and end this one if one is lost.

    Args:
        rank: Rank of this process.
        world_size: Number of ranks; a single rank is not watched.
        timeout: Seconds that a rank may take for a step before it counts as hung; 0: no limit.
        share: Broadcasts a value of rank 0; called once.
        on_loss: Called with the failure, as a sentence, before this process exits.
        stacks: Folder for the Python stacks of all threads if a rank hangs, one file per rank.

    Attributes:
        failure: Which rank is lost, and why; None as long as none is.
        reporter: The rank that writes the status of the run: 0, or 1 if rank 0 is lost.
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
        self._stopped = threading.Event()
        self._leaves = False
        self._ending = threading.Lock()
        self._threads: list[threading.Thread] = []
        self.failure: str | None = None
        self.reporter = 0
        self.heartbeat(step=0, phase="start")
        if world_size == 1:
            return
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        self._own = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._host_0, port = share((socket.gethostname(), self._own.port))
        # A host name may not resolve on other hosts, and not even on its own.
        names = [os.environ.get("MASTER_ADDR", self._host_0), self._host_0]
        if self._host_0 == socket.gethostname():
            names.insert(0, "127.0.0.1")
        # A connection for each thread, since one that blocks in a store blocks its other users.
        stores = [connect(names, port) for _ in range(2)]
        if None in stores:
            logger.warning(
                f"Rank {rank} does not reach rank 0 on {self._host_0}, port {port}: if it hangs, "
                "no rank will report it."
            )
            return
        board, other = (Board(s, rank=rank, world_size=world_size) for s in stores if s is not None)
        board.say("address", (own_address(), self._own.port))
        self._heard = time.monotonic()
        self._start(self._attend, board)
        if rank + 1 < world_size:
            self._start(self._watch_next, other)
        if rank > 0:
            self._start(self._watch_clock)
            with contextlib.suppress(RuntimeError):  # a death before it is watched goes unnoticed
                board.read(f"watched/{rank}", time.monotonic() + CONNECT_SECONDS)

    def _start(self, work: Callable[..., None], *args: Any) -> None:
        self._threads.append(threading.Thread(target=work, args=args, daemon=True))
        self._threads[-1].start()

    def heartbeat(self, *, step: int, phase: Phase) -> None:
        """Record that this rank makes progress.

        Args:
            step: Optimizer steps done.
            phase: What the rank does next.
        """
        self._step, self._phase, self._since = step, phase, time.monotonic()

    def keep_alive(self) -> None:
        """Record that this rank makes progress within its phase."""
        self._since = time.monotonic()

    def close(self) -> None:
        """Tell the others that this rank leaves, and stop; unless it is rank 0 they go on."""
        self._leaves = True
        self._stopped.set()
        for thread in self._threads[:1]:  # `_attend`, which tells the others
            thread.join(_LEAVE_SECONDS)
        self.stop()

    def stop(self) -> None:
        """Stop watching before an exit; the others take this rank for lost if it was not closed.

        A thread that returned from a store while Python shuts down would abort the process.
        """
        self._stopped.set()
        for thread in self._threads:
            thread.join(_END_SECONDS)

    def wait_for_failure(self, seconds: float) -> str | None:
        """Wait up to some seconds for the reason of an error: the rank that has failed, or None."""
        deadline = time.monotonic() + (seconds if self._threads else 0.0)
        while self.failure is None and (time.monotonic() < deadline or self._ending.locked()):
            time.sleep(POLL_SECONDS)
        return self.failure

    def _attend(self, board: Board) -> None:
        """Write heartbeats and read failures until this rank or rank 0 leaves, or one is lost."""
        first = None
        try:
            while True:
                if self._stopped.is_set() and not self._leaves:
                    return
                leaves = self._leaves or board.read("closed") is not None
                beat = {
                    "name": f"rank {self._rank} on {socket.gethostname()}",
                    "step": self._step,
                    "phase": self._phase,
                    "age": time.monotonic() - self._since,
                    "left": leaves,
                }
                board.say("beat", beat)
                failure = None if leaves else board.read("failure")
                # The store answers even while Python is blocked on rank 0: watch its heartbeat.
                first, before = board.heard_from("beat", 0), first
                self._heard = self._heard if first == before else time.monotonic()
                if leaves or failure is not None:
                    break
                if self._rank == 0 and (hung := self._find_hung(board)) is not None:
                    board.post("failure", hung)
                    continue
                self._stopped.wait(_BEAT_SECONDS)
            if leaves:
                self._stopped.set()
                if self._rank == 0:
                    board.post("closed", "")
            board.say("gone", True)
            if failure is not None:
                self._end(failure, board)
            elif self._rank == 0:  # its exit closes the board
                board.wait("gone", time.monotonic() + _LEAVE_SECONDS)
        except RuntimeError:  # the store has lost its connection
            if not self._stopped.is_set():
                self.reporter = 1
                self._end(f"rank 0 on {self._host_0} has died, about step {self._step}")

    def _watch_next(self, board: Board) -> None:
        """Poll the store of the next rank until its process dies."""
        rank = self._rank + 1
        with contextlib.suppress(RuntimeError):  # `_attend` reports the death of rank 0
            while (address := board.heard_from("address", rank)) is None:
                if self._stopped.wait(POLL_SECONDS):
                    return
            host, port = address
            store = connect([host], port)
            board.post(f"watched/{rank}", "")
            if store is None:
                logger.warning(
                    f"Rank {self._rank} does not reach rank {rank} at {host}, port {port}: if it "
                    "dies, no rank will report it."
                )
                return
            with contextlib.suppress(RuntimeError):  # the connection has closed
                while not self._stopped.wait(_BEAT_SECONDS):
                    store.check(["alive"])  # blocks while the process is stopped
                return
            last = board.heard_from("beat", rank) or {}
            if not last.get("left"):
                name, step = last.get("name", f"rank {rank} at {host}"), last.get("step", 0)
                board.post("failure", f"{name} has died, about step {step}")

    def _watch_clock(self) -> None:
        """Detect a rank 0 that hangs, even while `_attend` is blocked in its store."""
        while not self._stopped.wait(_BEAT_SECONDS):
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
        # A stopped process sends no heartbeat, and its last one may be of another phase. A rank
        # that hangs is behind the ranks that wait for it.
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
            return  # another thread has detected the failure first
        logger.error(f"error: {failure}; this rank {self._rank} ends too.")
        try:
            with contextlib.suppress(OSError):  # a full disk must not keep this process alive
                self._on_loss(failure)
                if " hangs: " in failure:  # on every rank, whichever rank detected it
                    self._dump_stacks(failure)
            if self._rank == 0 and board is not None:  # its exit closes the board
                deadline, others = time.monotonic() + _SILENT_SECONDS, self._world_size - 1
                with contextlib.suppress(RuntimeError):
                    while len(board.heard("gone")) < others and time.monotonic() < deadline:
                        time.sleep(POLL_SECONDS)
        finally:
            self.failure = failure  # from here on the training thread may exit the process
            if not self._stopped.wait(_END_SECONDS):
                os._exit(EXIT_PEER_LOST)

    def _dump_stacks(self, failure: str) -> None:
        self._stacks.mkdir(parents=True, exist_ok=True)
        with (self._stacks / f"rank_{self._rank:05d}.txt").open("w", encoding="utf-8") as file:
            file.write(f"{failure}\n\n")
            file.flush()
            faulthandler.dump_traceback(file)
        # PyTorch's flight recorder: the last collectives of this rank, for `torchfrtrace`.
        from torch._C import _distributed_c10d

        for backend, name in (("nccl", "_dump_nccl_trace"), ("gloo", "_dump_fr_trace")):
            if (dump := getattr(_distributed_c10d, name, None)) is not None:
                (self._stacks / f"{backend}_rank_{self._rank}").write_bytes(dump())
