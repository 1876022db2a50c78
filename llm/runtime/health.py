"""Detects dead and hanging ranks through a connection from each rank to rank 0.

Every rank sends its progress twice a second, and rank 0 looks for ranks that make no progress
within their limit. When a process dies, the system closes its connections. Rank 0 sends the failure
to all ranks, and every rank exits: otherwise its collective would time out half an hour later,
without naming the failed rank. If a rank hangs in C code, none of its threads can run Python; the
timer of `faulthandler` ends it, which each heartbeat resets.
"""

import contextlib
import faulthandler
import json
import logging
import math
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Literal

EXIT_PEER_LOST = 76
"""Exit code of a rank that exits because another rank has died or hangs."""

Phase = Literal["start", "step", "evaluation", "save"]
_TIMES: dict[Phase, int] = {"start": 3, "step": 1, "evaluation": 1, "save": 3}
"""The limit of each phase, in timeouts."""
_BEAT_SECONDS = 0.5
_CONNECT_SECONDS = 20.0
_SILENT_SECONDS = 3.0  # without a heartbeat until a process counts as stopped
_END_SECONDS = 3.0  # for the training thread to exit
_LEAVE_SECONDS = 20.0
_STRANGER_SECONDS = 2  # for the rest of a message; a port scanner may never send it
_MESSAGE_BYTES = 4096
_STUCK_SECONDS = 30.0  # after the limit, for the others to name a rank that cannot run Python

logger = logging.getLogger("llm")


@dataclass
class _Peer:
    """The last heartbeat of a rank, and when rank 0 read it."""

    beat: dict[str, Any]
    heard: float

    @property
    def since(self) -> float:
        """When the rank last made progress."""
        return float(self.heard - self.beat["age"])


class Health:
    """The watchdog of a run: a thread that watches all ranks and ends this one if any is lost.

    Args:
        rank: Rank of this process.
        world_size: Number of ranks; a single rank is not watched.
        timeout: Seconds that a rank may take for a step before it counts as hung; 0: no limit.
        share: Broadcasts rank 0's value to every rank; called once.
        on_loss: Called with the failure, as a sentence, before this process exits.
        stacks: Folder for the Python stacks of all threads if a rank hangs, one file per rank.

    Attributes:
        failure: Which rank is lost, and why; None while all ranks run.
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
        self._name = f"rank {rank} on {socket.gethostname()}"
        self._limits = {phase: times * (timeout or math.inf) for phase, times in _TIMES.items()}
        self._on_loss, self._stacks = on_loss, stacks
        self._stopped, self._leaves = threading.Event(), False
        self._ending = threading.Event()
        self._thread: threading.Thread | None = None
        # The last heartbeat of each connection. A connection stays open until this process exits.
        self._lines: dict[Connection, _Peer | None] = {}
        self._armed = -math.inf
        self._phase: Phase = "start"
        self._key = ""  # of the run; strangers may connect to rank 0, but do not know it
        self.failure: str | None = None
        self.reporter = 0
        self.heartbeat(step=0, phase="start")
        if world_size == 1:
            return
        if rank == 0:
            self._server = _listen(world_size)
            self._key = secrets.token_hex(16)
            share((socket.gethostname(), self._server.getsockname()[1], self._key))
            self._thread = threading.Thread(target=self._lead, daemon=True)
        else:
            host, port, self._key = share(None)
            line = _connect(host, port)
            if line is None:
                logger.warning(
                    f"Rank {rank} does not reach rank 0 on {host}, port {port}: if it dies or "
                    "hangs, no rank will report it."
                )
                return
            _send(line, self._beat())  # rank 0 knows it even if it dies now
            self._lines[line] = None
            self._thread = threading.Thread(target=self._follow, args=(line, host), daemon=True)
        self._thread.start()

    def heartbeat(self, *, step: int, phase: Phase) -> None:
        """Record that this rank makes progress.

        Args:
            step: Optimizer steps done.
            phase: The phase that begins now.
        """
        if phase != self._phase:
            self._armed = -math.inf  # the timer has the limit of another phase
        self._step, self._phase = step, phase
        self.keep_alive()

    def keep_alive(self) -> None:
        """Record that this rank makes progress within its phase."""
        self._since = time.monotonic()
        limit = self._limits[self._phase] + _STUCK_SECONDS
        if self._world_size > 1 and limit < math.inf and self._since - self._armed >= 1.0:
            self._armed = self._since
            faulthandler.dump_traceback_later(limit, exit=True, file=2)

    def close(self) -> None:
        """Tell the others that this rank leaves, and stop. They continue unless it is rank 0."""
        self._leaves = True
        self._stopped.set()
        if self._thread is not None:
            self._thread.join(_LEAVE_SECONDS)
        self.stop()

    def stop(self) -> None:
        """Stop watching before an exit. Without `close`, the others report this rank as lost."""
        faulthandler.cancel_dump_traceback_later()
        self._stopped.set()
        if self._thread is not None:
            self._thread.join(_END_SECONDS)

    def wait_for_failure(self, seconds: float) -> str | None:
        """Wait up to `seconds` for the cause of an error: the failed rank, or None."""
        deadline = time.monotonic() + (0.0 if self._thread is None else seconds)
        while self.failure is None and (time.monotonic() < deadline or self._ending.is_set()):
            time.sleep(0.05)
        return self.failure

    def _beat(self) -> dict[str, Any]:
        return {
            "key": self._key,
            "name": self._name,
            "step": self._step,
            "phase": self._phase,
            "age": time.monotonic() - self._since,
            "left": self._leaves,
        }

    def _lead(self) -> None:
        """Receive heartbeats until this rank leaves or one is lost; then notify the others."""
        failure = None
        while failure is None and not self._stopped.wait(_BEAT_SECONDS):
            failure = self._hear() or self._find_hung()
            self._tell({"alive": True})
        if failure is not None:
            self._tell({"failure": failure})
            self._end(failure)
        elif self._leaves:  # otherwise an error ends this rank, and the others report it as lost
            self._tell_until_gone({"failure": None}, _LEAVE_SECONDS)

    def _hear(self) -> str | None:
        """Read all messages of the ranks; return a failure if one has died."""
        failure = None
        while ready := wait([self._server, *self._lines], 0):
            for line in ready:
                if line is self._server:
                    accepted = self._server.accept()[0]
                    limit = struct.pack("ll", _STRANGER_SECONDS, 0)
                    accepted.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
                    self._lines[Connection(accepted.detach())] = None
                    continue
                assert isinstance(line, Connection)
                try:
                    beat = json.loads(line.recv_bytes(_MESSAGE_BYTES))
                    if beat["key"] != self._key:
                        raise ValueError("The sender is not one of this run's ranks.")
                    self._lines[line] = _Peer(beat, time.monotonic())
                except (OSError, EOFError, ValueError, KeyError, TypeError):  # a stranger's bytes
                    last = self._lines.pop(line)
                    if failure is None and last is not None and not last.beat["left"]:
                        failure = f"{last.beat['name']} has died, about step {last.beat['step']}"
        return failure  # not before the other ranks are known, which must be told

    def _tell(self, message: dict[str, Any]) -> None:
        for line, peer in self._lines.items():
            if peer is not None:
                _send(line, message)

    def _tell_until_gone(self, message: dict[str, Any], seconds: float) -> None:
        """Tell all ranks until they have disconnected: an earlier exit could lose a message."""
        deadline = time.monotonic() + seconds
        while (now := time.monotonic()) < deadline:
            self._hear()
            self._tell(message)
            peers = [peer for peer in self._lines.values() if peer is not None]
            if all(now - peer.heard > _SILENT_SECONDS for peer in peers):
                return  # the remaining ranks have stopped
            time.sleep(0.05)

    def _follow(self, line: Connection, host: str) -> None:
        """Send heartbeats until this rank leaves, or rank 0 reports a failure or is lost."""
        heard = time.monotonic()
        while not self._stopped.wait(_BEAT_SECONDS):
            _send(line, self._beat())
            try:
                while line.poll():
                    heard, told = time.monotonic(), json.loads(line.recv_bytes())
                    if "failure" in told:
                        line.close()
                        return None if told["failure"] is None else self._end(told["failure"])
            except (OSError, EOFError):
                return self._end(f"rank 0 on {host} has died, about step {self._step}", reporter=1)
            silent, limit = time.monotonic() - heard, self._limits[self._phase]
            if silent > max(limit, _SILENT_SECONDS):
                failure = (
                    f"rank 0 on {host} hangs: no heartbeat for {silent:.0f} s of a {self._phase} "
                    f"after step {self._step} (limit {limit:g} s)"
                )
                return self._end(failure, reporter=1)
        if self._leaves:
            _send(line, self._beat())
            line.close()
        return None

    def _find_hung(self) -> str | None:
        now = time.monotonic()
        peers = [peer for peer in self._lines.values() if peer is not None]
        peers.append(_Peer(self._beat(), now))
        late = [p for p in peers if now - p.since > self._limits[p.beat["phase"]]]
        if not late or any(p.beat["left"] for p in late):
            return None
        # A stopped process sends no heartbeat, and its last one may come from another phase. A
        # hanging rank is behind the ranks that wait for it.
        silent = [p for p in peers if now - p.heard >= _SILENT_SECONDS]
        worst = min(silent or late, key=lambda peer: (peer.beat["step"], peer.since))
        limit = min(self._limits[peer.beat["phase"]] for peer in late)
        alike = not silent and all(p.beat["step"] == worst.beat["step"] for p in peers)
        everyone = "every rank"
        if len(peers) < self._world_size:  # the others may wait for one that did not connect
            everyone = f"every rank that rank 0 hears ({len(peers)} of {self._world_size})"
        who = everyone if alike else worst.beat["name"]
        return (
            f"{who} hangs: no progress for {now - worst.since:.0f} s of its {worst.beat['phase']} "
            f"after step {worst.beat['step']} (limit {limit:g} s)"
        )

    def _end(self, failure: str, *, reporter: int = 0) -> None:
        self.reporter = reporter
        self._ending.set()
        logger.error(f"error: {failure}; this rank {self._rank} ends too.")
        try:
            with contextlib.suppress(OSError):  # a full disk must not keep this process alive
                self._on_loss(failure)
                if " hangs: " in failure:  # on every rank, whichever rank detected it
                    self._dump_stacks(failure)
            if self._rank == 0:
                self._tell_until_gone({"failure": failure}, _SILENT_SECONDS)
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


def _listen(backlog: int) -> socket.socket:
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    return socket.create_server(("", 0), family=family, backlog=backlog, dualstack_ipv6=both)


def _connect(host: str, port: int) -> Connection | None:
    """Connect to rank 0 under the first of its host names that works; None if none works."""
    # A host name may not resolve on other hosts, and not even on its own.
    names = [os.environ.get("MASTER_ADDR", host), host]
    if host == socket.gethostname():
        names.insert(0, "127.0.0.1")
    for name in names:
        with contextlib.suppress(OSError):
            connection = socket.create_connection((name, port), timeout=_CONNECT_SECONDS)
            connection.settimeout(None)
            return Connection(connection.detach())
    return None


def _send(line: Connection, message: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):  # disconnected or dead; the next read will show it
        line.send_bytes(json.dumps(message).encode())
