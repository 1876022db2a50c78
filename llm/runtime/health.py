"""Detects dead and hanging ranks through a connection from each rank to rank 0.

Every rank sends its progress twice a second, and rank 0 looks for ranks that make no progress
within their limit. When a process dies, the system closes its connections. Rank 0 sends the failure
to all ranks, and every rank exits: otherwise its collective would time out half an hour later,
without naming the failed rank. If a rank hangs in C code, none of its threads can run Python; the
timer of `faulthandler` ends it, which each heartbeat resets.
"""

import contextlib
import faulthandler
import functools
import json
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

from llm.runtime.heartbeat_server import HeartbeatServer, LineChannel, connect_to_server
from llm.runtime.world import is_on_one_host

EXIT_PEER_LOST = 76
"""Exit code of a rank that exits because another rank has died or hangs."""

Phase = Literal["start", "step", "evaluation", "save"]
_LIMITS_IN_TIMEOUTS: dict[Phase, int] = {"start": 3, "step": 1, "evaluation": 1, "save": 3}
"""The time without progress after which a rank hangs, by phase, as a multiple of `timeout`."""
_HEARTBEAT_SECONDS = 0.5
_SILENCE_SECONDS = 3.0  # without a heartbeat until a process counts as stopped
_EXIT_SECONDS = 3.0  # for the training thread to exit
_LEAVE_SECONDS = 20.0  # for the other ranks to disconnect
_STUCK_SECONDS = 30.0  # after the limit, for the others to name a rank that cannot run Python

logger = logging.getLogger("llm")


@dataclass
class _Peer:
    """The last heartbeat of a rank, and when rank 0 received it."""

    heartbeat: dict[str, Any]
    received_at: float

    @property
    def progress_at(self) -> float:
        """When the rank last made progress."""
        return float(self.received_at - self.heartbeat["age"])


class Health:
    """The watchdog of a run: a thread that watches all ranks and ends this one if any is lost.

    Args:
        rank: Rank of this process.
        world_size: Number of ranks; a single rank is not watched.
        timeout: Seconds that a rank may take for a step before it counts as hung; 0: no limit.
        broadcast: Sends rank 0's value to every rank and returns it; called once.
        on_loss: Called with the failure, as a sentence, before this process exits.
        stacks_folder: Folder for the stacks of all threads if a rank hangs, one file per rank.

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
        broadcast: Callable[[Any], Any],
        on_loss: Callable[[str], None],
        stacks_folder: Path,
    ) -> None:
        self._rank, self._world_size = rank, world_size
        self._name = f"rank {rank} on {socket.gethostname()}"
        seconds_per_timeout = timeout or math.inf
        self._limits = {
            phase: num_timeouts * seconds_per_timeout
            for phase, num_timeouts in _LIMITS_IN_TIMEOUTS.items()
        }
        self._on_loss = on_loss
        self._stacks_folder = stacks_folder
        self._is_stopped, self._is_ending = threading.Event(), threading.Event()
        self._is_leaving = False
        # The last heartbeat of each connection. A connection stays open until this process exits.
        self._peers: dict[LineChannel, _Peer] = {}
        self._timer_set_at = -math.inf
        self._phase: Phase = "start"
        self.failure: str | None = None
        self.reporter = 0
        self.heartbeat(step=0, phase="start")

        self._thread: threading.Thread | None = None
        if world_size > 1 and rank == 0:
            self._open_server(broadcast)
            self._start_thread(self._watch_ranks)
        elif world_size > 1:
            channel = self._join_server(broadcast)
            if channel is not None:
                self._start_thread(functools.partial(self._watch_rank0, channel))

    def _open_server(self, broadcast: Callable[[Any], Any]) -> None:
        """Listen for the heartbeats of the other ranks, and tell them the address."""
        is_local = is_on_one_host(os.environ, self._world_size)
        self._server = HeartbeatServer(
            host=None if is_local else os.environ.get("MASTER_ADDR"),
            num_ranks=self._world_size - 1,
        )
        broadcast((socket.gethostname(), self._server.host, self._server.port, self._server.key))

    def _join_server(self, broadcast: Callable[[Any], Any]) -> LineChannel | None:
        """Learn the address of rank 0 and connect to it; warn and return None if that fails."""
        self._host, self._address, self._port, self._key = broadcast(None)
        channel = self._connect_to_rank0()
        if channel is None:
            logger.warning(
                f"Rank {self._rank} does not reach rank 0 on {self._host}, port {self._port}: if "
                "it dies or hangs, no rank will report it."
            )
        return channel

    def _start_thread(self, watch: Callable[[], None]) -> None:
        """Start the thread that sends and checks heartbeats until this rank leaves."""
        self._thread = threading.Thread(target=watch, daemon=True)
        self._thread.start()

    def heartbeat(self, *, step: int, phase: Phase) -> None:
        """Record that this rank makes progress.

        Args:
            step: Optimizer steps done.
            phase: The phase that begins now.
        """
        if phase != self._phase:
            self._timer_set_at = -math.inf  # the timer has the limit of another phase
        self._step, self._phase = step, phase
        self.keep_alive()

    def keep_alive(self) -> None:
        """Record that this rank makes progress within its phase."""
        self._progress_at = time.monotonic()
        limit = self._limits[self._phase] + _STUCK_SECONDS
        has_limit = self._world_size > 1 and limit < math.inf
        if has_limit and self._progress_at - self._timer_set_at >= 1.0:
            self._timer_set_at = self._progress_at
            faulthandler.dump_traceback_later(limit, exit=True, file=2)

    def close(self) -> None:
        """Tell the others that this rank leaves, and stop. They continue unless it is rank 0."""
        self._is_leaving = True
        self._is_stopped.set()
        if self._thread is not None:
            self._thread.join(_LEAVE_SECONDS)
        self.stop()

    def stop(self) -> None:
        """Stop watching before an exit. Without `close`, the others report this rank as lost."""
        faulthandler.cancel_dump_traceback_later()
        self._is_stopped.set()
        if self._thread is not None:
            self._thread.join(_EXIT_SECONDS)

    def wait_for_failure(self, seconds: float) -> str | None:
        """Wait up to `seconds` for the cause of an error: the failed rank, or None."""
        deadline = time.monotonic() + (0.0 if self._thread is None else seconds)
        while self.failure is None and (time.monotonic() < deadline or self._is_ending.is_set()):
            time.sleep(0.05)
        return self.failure

    def _make_heartbeat(self) -> dict[str, Any]:
        """Return the message that tells rank 0 the progress of this rank."""
        return {
            "name": self._name,
            "step": self._step,
            "phase": self._phase,
            "age": time.monotonic() - self._progress_at,
            "leaves": self._is_leaving,
        }

    def _watch_ranks(self) -> None:
        """Receive heartbeats until this rank leaves or one is lost; then notify the others."""
        failure = None
        while failure is None and not self._is_stopped.wait(_HEARTBEAT_SECONDS):
            failure = self._receive_heartbeats() or self._find_hung_rank()
            self._send_to_ranks({"alive": True})
        if failure is not None:
            self._send_to_ranks({"failure": failure})
            self._end_process(failure)
        elif self._is_leaving:  # after an error, the others report this rank as lost
            self._send_until_disconnected({"failure": None}, _LEAVE_SECONDS)

    def _receive_heartbeats(self) -> str | None:
        """Record the heartbeats that have arrived; return a failure if a rank has died."""
        heartbeats_of_dead = []
        for channel, line in self._server.receive():
            if line is not None:
                self._peers[channel] = _Peer(json.loads(line), time.monotonic())
                continue
            lost_peer = self._peers.pop(channel, None)
            if lost_peer is not None and not lost_peer.heartbeat["leaves"]:
                heartbeats_of_dead.append(lost_peer.heartbeat)
        # After the loop, because all other ranks must be known before they are notified.
        if not heartbeats_of_dead:
            return None
        first_heartbeat = heartbeats_of_dead[0]
        return f"{first_heartbeat['name']} has died, about step {first_heartbeat['step']}"

    def _send_to_ranks(self, message: dict[str, Any]) -> None:
        """Send a message to all ranks that are connected."""
        line = json.dumps(message).encode()
        for channel in self._peers:
            channel.send(line)

    def _send_until_disconnected(self, message: dict[str, Any], seconds: float) -> None:
        """Send to all ranks until they have disconnected: an earlier exit could lose a message."""
        deadline = time.monotonic() + seconds
        while (checked_at := time.monotonic()) < deadline:
            self._receive_heartbeats()
            self._send_to_ranks(message)
            silences = [checked_at - peer.received_at for peer in self._peers.values()]
            if all(seconds_silent > _SILENCE_SECONDS for seconds_silent in silences):
                return  # the remaining ranks have stopped
            time.sleep(0.05)

    def _connect_to_rank0(self) -> LineChannel | None:
        """Connect to rank 0, which then knows this rank even if it dies at once."""
        # The name of a host may not resolve on other hosts, and not even on itself.
        hosts = [self._address]
        if not self._address:  # rank 0 listens on all interfaces
            hosts = [os.environ.get("MASTER_ADDR", self._host), self._host]
            if self._host == socket.gethostname():
                hosts.insert(0, "127.0.0.1")
        channel = connect_to_server(hosts, self._port)
        if channel is not None:
            channel.send(self._key.encode())
            self._send_heartbeat(channel)
        return channel

    def _watch_rank0(self, channel: LineChannel) -> None:
        """Send heartbeats until this rank leaves, or rank 0 reports a failure or is lost."""
        received_at, has_received = time.monotonic(), False
        while not self._is_stopped.wait(_HEARTBEAT_SECONDS):
            self._send_heartbeat(channel)
            try:
                messages = [json.loads(line) for line in channel.receive()]
            except ConnectionError:
                channel.close()
                # Rank 0 closes a connection if the key comes late, because this process was stopped
                # in between, for example.
                new_channel = None if has_received else self._connect_to_rank0()
                if new_channel is None:
                    death = f"rank 0 on {self._host} has died, about step {self._step}"
                    self._end_process(death, reporter=1)
                    return
                channel, messages = new_channel, []

            if messages:
                received_at, has_received = time.monotonic(), True
            farewell = next((message for message in messages if "failure" in message), None)
            if farewell is not None:
                channel.close()
                if farewell["failure"] is not None:  # otherwise rank 0 leaves without a failure
                    self._end_process(farewell["failure"])
                return

            hang = self._find_hang_of_rank0(time.monotonic() - received_at)
            if hang is not None:
                self._end_process(hang, reporter=1)
                return

        if self._is_leaving:
            self._send_heartbeat(channel)
            channel.close()

    def _send_heartbeat(self, channel: LineChannel) -> None:
        """Send the progress of this rank to rank 0."""
        channel.send(json.dumps(self._make_heartbeat()).encode())

    def _find_hang_of_rank0(self, seconds_silent: float) -> str | None:
        """Return the failure of rank 0 if it has been silent for longer than its limit."""
        limit = self._limits[self._phase]
        if seconds_silent <= max(limit, _SILENCE_SECONDS):
            return None
        return (
            f"rank 0 on {self._host} hangs: no heartbeat for {seconds_silent:.0f} s of a "
            f"{self._phase} after step {self._step} (limit {limit:g} s)"
        )

    def _find_hung_rank(self) -> str | None:
        """Return the failure of a rank that makes no progress within its limit, or None."""
        checked_at = time.monotonic()
        peers = [*self._peers.values(), _Peer(self._make_heartbeat(), checked_at)]
        late_peers = [
            peer
            for peer in peers
            if checked_at - peer.progress_at > self._limits[peer.heartbeat["phase"]]
        ]
        if not late_peers or any(peer.heartbeat["leaves"] for peer in late_peers):
            return None

        # A stopped process sends no heartbeat, and its last one may come from another phase. A
        # hanging rank is behind the ranks that wait for it.
        silent_peers = [peer for peer in peers if checked_at - peer.received_at >= _SILENCE_SECONDS]
        hung_peer = min(
            silent_peers or late_peers, key=lambda peer: (peer.heartbeat["step"], peer.progress_at)
        )
        hung_step = hung_peer.heartbeat["step"]
        is_same_step = all(peer.heartbeat["step"] == hung_step for peer in peers)
        hung_name = hung_peer.heartbeat["name"]
        if is_same_step and not silent_peers:  # nothing tells which rank the others wait for
            hung_name = self._describe_connected_ranks()
        limit = min(self._limits[peer.heartbeat["phase"]] for peer in late_peers)
        return (
            f"{hung_name} hangs: no progress for {checked_at - hung_peer.progress_at:.0f} s of its "
            f"{hung_peer.heartbeat['phase']} after step {hung_step} (limit {limit:g} s)"
        )

    def _describe_connected_ranks(self) -> str:
        """Return "every rank", with their number if some rank has not connected."""
        num_connected = len(self._peers) + 1
        if num_connected >= self._world_size:
            return "every rank"
        # The connected ranks may wait for one that did not connect.
        return f"every rank that rank 0 hears ({num_connected} of {self._world_size})"

    def _end_process(self, failure: str, *, reporter: int = 0) -> None:
        """Report a failure, give the training thread time to exit, then exit the process."""
        self.reporter = reporter
        self._is_ending.set()
        logger.error(f"error: {failure}; this rank {self._rank} ends too.")
        try:
            with contextlib.suppress(OSError):  # a full disk must not keep this process alive
                self._on_loss(failure)
                if " hangs: " in failure:  # on every rank, whichever rank detected it
                    self._dump_stacks(failure)
            if self._rank == 0:
                self._send_until_disconnected({"failure": failure}, _SILENCE_SECONDS)
        finally:
            self.failure = failure  # from here on the training thread may exit the process
            if not self._is_stopped.wait(_EXIT_SECONDS):
                os._exit(EXIT_PEER_LOST)

    def _dump_stacks(self, failure: str) -> None:
        """Write the Python stacks of all threads, and the last collectives, into files."""
        self._stacks_folder.mkdir(parents=True, exist_ok=True)
        stacks_path = self._stacks_folder / f"rank_{self._rank:05d}.txt"
        with stacks_path.open("w", encoding="utf-8") as file:
            file.write(f"{failure}\n\n")
            file.flush()
            faulthandler.dump_traceback(file)
        # PyTorch's flight recorder: the last collectives of this rank, for `torchfrtrace`.
        from torch._C import _distributed_c10d

        for backend, dump_name in (("nccl", "_dump_nccl_trace"), ("gloo", "_dump_fr_trace")):
            if (dump := getattr(_distributed_c10d, dump_name, None)) is not None:
                (self._stacks_folder / f"{backend}_rank_{self._rank}").write_bytes(dump())
