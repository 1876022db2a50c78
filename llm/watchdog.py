"""Notices a rank that has died or hangs, says which, and ends the others.

Every rank keeps a connection to rank 0 over which it says, once a second, how far it has come.
The kernel closes the connection of a process that dies, so that is known at once; one that hangs
or was stopped is known by its limit. Rank 0 tells all, and each ends itself: what it waits for
would only time out, half an hour later and without a name.
"""

import contextlib
import json
import logging
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

EXIT_PEER_LOST = 76
"""Exit code of a rank that ended because another one died or hung."""

Phase = Literal["start", "step", "evaluation", "save"]
_BEAT_SECONDS = 1.0
_SILENT_SECONDS = 3.0
_CONNECT_SECONDS = 20.0
_ALIVE = "."  # what rank 0 says as long as there is nothing to say

logger = logging.getLogger("llm")


@dataclass
class _Peer:
    """What rank 0 knows of one rank."""

    rank: int = -1
    host: str = "?"
    step: int = 0
    phase: Phase = "start"
    since: float = field(default_factory=time.monotonic)  # when it last got on
    heard: float = field(default_factory=time.monotonic)  # when it last said anything
    left: bool = False
    buffer: bytes = b""

    @property
    def name(self) -> str:
        return f"rank {self.rank} on {self.host}"


class Watchdog:
    """Watches over the ranks of one run, from a thread of its own.

    Args:
        rank: Of this process.
        world_size: Number of ranks; one alone is not watched.
        limits: Seconds after which a rank that has not got on in a phase counts as hung.
        share: Gives every rank the value that rank 0 has; called once.
        on_loss: Told the sentence, before this process ends itself.

    Attributes:
        verdict: Which rank is lost, and why; None as long as none is.
        speaker: The rank that tells the world: 0, or 1 once rank 0 is the one that is lost.
    """

    def __init__(
        self,
        *,
        rank: int,
        world_size: int,
        limits: Mapping[Phase, float],
        share: Callable[[Any], Any],
        on_loss: Callable[[str], None],
    ) -> None:
        self._rank = rank
        self._limits = dict(limits)
        self._on_loss = on_loss
        self._step = 0
        self._phase: Phase = "start"
        self._since = time.monotonic()
        self._ended = threading.Event()
        self.verdict: str | None = None
        self.speaker = 0
        self._connection: socket.socket | None = None
        if world_size == 1:
            return
        server = None
        if rank == 0:
            server = socket.create_server(("", 0), backlog=world_size, dualstack_ipv6=False)
        address = (socket.gethostname(), server.getsockname()[1]) if server else None
        self._host, port = share(address)
        if server is not None:
            self._hub = threading.Thread(
                target=self._serve, args=(server, world_size), name="watchdog-hub", daemon=True
            )
            self._hub.start()
        self._connection = _connect(self._host, port)
        if self._connection is None:
            logger.warning(
                f"Rank {rank} does not reach rank 0 on {self._host}, port {port}: if it hangs, "
                "nobody will say so."
            )
            return
        self._send(left=False)  # at once: who has not said its name cannot be missed
        threading.Thread(target=self._beat, name="watchdog-beat", daemon=True).start()
        threading.Thread(
            target=self._listen, args=(self._connection,), name="watchdog-ear", daemon=True
        ).start()

    def got_on(self, *, step: int, phase: Phase) -> None:
        """Say that this rank makes progress.

        Args:
            step: Optimizer steps done.
            phase: What it does next.
        """
        self._step, self._phase, self._since = step, phase, time.monotonic()

    def still_going(self) -> None:
        """Say that this rank makes progress within what it does."""
        self._since = time.monotonic()

    def close(self) -> None:
        """Leave in good order: the others go on."""
        if self._ended.is_set() or self._connection is None:
            return
        self._ended.set()
        self._send(left=True)
        if self._rank == 0:
            self._hub.join()
        self._connection.close()

    def wait_for_verdict(self, seconds: float) -> str | None:
        """Why this process' communication failed, if another rank is the reason."""
        deadline = time.monotonic() + (0.0 if self._connection is None else seconds)
        while self.verdict is None and time.monotonic() < deadline:
            time.sleep(0.1)
        return self.verdict

    def _beat(self) -> None:
        while not self._ended.wait(_BEAT_SECONDS):
            self._send(left=False)

    def _send(self, *, left: bool) -> None:
        beat = {
            "rank": self._rank,
            "host": socket.gethostname(),
            "step": self._step,
            "phase": self._phase,
            "age": time.monotonic() - self._since,
            "left": left,
        }
        assert self._connection is not None  # else nobody beats
        with contextlib.suppress(OSError):  # `_listen` finds out why
            self._connection.sendall(json.dumps(beat).encode() + b"\n")

    def _listen(self, connection: socket.socket) -> None:
        """Hears what rank 0 says; its silence is that of a rank that is lost itself."""
        selector = selectors.DefaultSelector()
        selector.register(connection, selectors.EVENT_READ)
        received = b""
        heard = time.monotonic()
        while not self._ended.is_set():
            if not selector.select(_BEAT_SECONDS):
                silent, limit = time.monotonic() - heard, self._limits[self._phase]
                if silent > max(limit, _SILENT_SECONDS):
                    self._end_without_rank_0(
                        f"hangs: not heard of in {silent:.0f} s of a {self._phase} after step "
                        f"{self._step} (limit {limit:g} s)"
                    )
                    return
                continue
            try:
                chunk = connection.recv(4096)
            except OSError:
                chunk = b""
            if not chunk:
                if not self._ended.is_set():
                    self._end_without_rank_0(f"has died, about step {self._step}")
                return
            heard = time.monotonic()
            *lines, received = (received + chunk).split(b"\n")
            said = [line.decode() for line in lines if line.decode() != _ALIVE]
            if said:
                if said[0]:
                    self._end(said[0])
                return

    def _end_without_rank_0(self, what: str) -> None:
        self.speaker = 1
        self._end(f"rank 0 on {self._host} {what}")

    def _end(self, verdict: str) -> None:
        logger.error(f"error: {verdict}; this rank {self._rank} ends too.")
        try:
            with contextlib.suppress(OSError):  # nothing shall keep this process from ending
                self._on_loss(verdict)
        finally:
            self.verdict = verdict  # the thread that trains may end the process from here on
            # Long enough for it to end by itself if it can.
            if not self._ended.wait(3 * _BEAT_SECONDS):
                os._exit(EXIT_PEER_LOST)

    def _serve(self, server: socket.socket, world_size: int) -> None:
        """Rank 0's part: hears all ranks, and tells all of them who is lost."""
        peers: dict[socket.socket, _Peer] = {}
        selector = selectors.DefaultSelector()
        selector.register(server, selectors.EVENT_READ)
        told = time.monotonic()
        while True:
            if self._ended.is_set():  # rank 0 leaves in good order: nobody is watched any more
                _tell(peers, "")
                return
            for key, _ in selector.select(_BEAT_SECONDS):
                if key.fileobj is server:
                    connection, _ = server.accept()
                    peers[connection] = _Peer()
                    selector.register(connection, selectors.EVENT_READ)
                    continue
                connection = key.fileobj  # type: ignore[assignment]
                lost = _hear(connection, peers[connection])
                if lost is not None:
                    selector.unregister(connection)
                    gone = peers.pop(connection)
                    if gone.rank >= 0 and not gone.left:  # others that knock are no ranks
                        _tell(peers, lost)
                        return
            if time.monotonic() - told >= _BEAT_SECONDS:
                told = time.monotonic()
                _tell(peers, _ALIVE)
            if len(peers) == world_size and (hung := self._find_hung(list(peers.values()))):
                _tell(peers, hung)
                return

    def _find_hung(self, peers: list[_Peer]) -> str | None:
        now = time.monotonic()
        late = [peer for peer in peers if now - peer.since > self._limits[peer.phase]]
        if not late or any(peer.left for peer in late):
            return None
        # One that was stopped says nothing, and was perhaps last heard of in another phase; one
        # that hangs has got less far than those that wait for it.
        silent = [p for p in peers if now - p.heard >= _SILENT_SECONDS and not p.left]
        worst = min(silent or late, key=lambda peer: (peer.step, peer.since))
        limit = min(self._limits[peer.phase] for peer in late)
        return (
            f"{worst.name} hangs: nothing in {now - worst.since:.0f} s of its {worst.phase} after "
            f"step {worst.step} (limit {limit:g} s)"
        )


def _connect(host: str, port: int) -> socket.socket | None:
    """A connection to rank 0, by the address that the launcher knows or by the host's own name."""
    # The name of a host may mean nothing to others, and even nothing to itself.
    names = [os.environ.get("MASTER_ADDR"), host]
    if host == socket.gethostname():
        names.insert(0, "127.0.0.1")
    for name in names:
        if name is None:
            continue
        try:
            connection = socket.create_connection((name, port), timeout=_CONNECT_SECONDS)
        except OSError:
            continue
        connection.settimeout(None)
        return connection
    return None


def _hear(connection: socket.socket, peer: _Peer) -> str | None:
    """Takes in what a rank says; returns a sentence once it is gone."""
    try:
        chunk = connection.recv(65536)
    except OSError:
        chunk = b""
    if not chunk:
        return f"{peer.name} has died, about step {peer.step}"
    *lines, peer.buffer = (peer.buffer + chunk).split(b"\n")
    for line in lines:
        try:
            beat = json.loads(line)
            peer.rank, peer.host = beat["rank"], beat["host"]
            peer.left = peer.left or beat["left"]  # a beat may come in after the farewell
        except (ValueError, KeyError, TypeError):
            continue  # no rank of ours
        peer.step, peer.phase = beat["step"], beat["phase"]
        peer.heard = time.monotonic()
        peer.since = peer.heard - beat["age"]
    return None


def _tell(peers: Mapping[socket.socket, _Peer], verdict: str) -> None:
    for connection in peers:
        try:
            # One that was stopped reads nothing, and shall not keep the others waiting.
            connection.send(verdict.encode() + b"\n", socket.MSG_DONTWAIT)
        except OSError:
            continue
