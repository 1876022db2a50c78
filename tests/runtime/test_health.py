import contextlib
import ctypes
import multiprocessing
import os
import random
import signal
import socket
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest
import torch.distributed  # noqa: F401  so that a forked rank need not load it

from llm.runtime.health import EXIT_PEER_LOST, Health
from llm.runtime.heartbeat_server import connect_to_server

CONTEXT = multiprocessing.get_context("fork")
LIMIT = 4.0


def stand_still():
    time.sleep(60)


def connect_without_key(connect):
    """Connects as a rank does that is stopped before it can send the key; later as usual."""

    def connect_first(health):
        Health._connect_to_rank0 = connect
        return connect_to_server([health._address], health._port)

    return connect_first


class Ranks:
    """Processes that watch one another; each makes a step every tenth of a second."""

    def __init__(
        self,
        world_size,
        *,
        steps=10_000,
        hang=(),
        alone=None,
        silent=None,
        dies=None,
        late=(),
        end=Health.close,
    ):
        self.hang, self.alone, self.dies, self.late, self.end = hang, alone, dies, late, end
        self.silent = silent
        self.stacks = Path(tempfile.mkdtemp())
        self.address = CONTEXT.SimpleQueue()
        self.verdicts = CONTEXT.SimpleQueue()
        self.processes = [
            CONTEXT.Process(target=self.work, args=(rank, world_size, steps))
            for rank in range(world_size)
        ]
        for process in self.processes:
            process.start()

    def work(self, rank, world_size, steps):
        def share(address):
            if rank == 0:
                for _ in range(world_size):  # one of them for the test
                    self.address.put(address)
                return address
            return self.address.get()

        if rank == self.alone:
            Health._connect_to_rank0 = lambda health: None
        if rank == self.silent:
            Health._connect_to_rank0 = connect_without_key(Health._connect_to_rank0)
        if rank in self.late:
            time.sleep(0.2)
        health = Health(
            rank=rank,
            world_size=world_size,
            timeout=LIMIT,
            broadcast=share,
            on_loss=lambda failure: self.verdicts.put((rank, failure)),
            stacks_folder=self.stacks,
        )
        if rank == self.dies:
            os.kill(os.getpid(), signal.SIGKILL)
        for step in range(steps):
            if step == 10 and rank in self.hang:
                stand_still()
            health.heartbeat(step=step, phase="step")
            time.sleep(0.1)
        self.end(health)
        # A thread in a store while Python shuts down would abort the process now and then.
        sys.exit(threading.active_count() - 1)

    def ends(self):
        """Waits for all ranks but the first victim; returns seconds and exit codes."""
        began = time.monotonic()
        for process in self.processes:
            process.join(timeout=30)
        return time.monotonic() - began, [process.exitcode for process in self.processes]

    def said(self):
        found = {}
        while not self.verdicts.empty():
            rank, failure = self.verdicts.get()
            found[rank] = failure
        return found


@pytest.mark.parametrize("victim", [0, pytest.param(2, marks=pytest.mark.faults)])
def test_a_dead_rank_is_named_and_the_others_end_within_ten_seconds(victim):
    ranks = Ranks(3)
    time.sleep(2.5)

    os.kill(ranks.processes[victim].pid, signal.SIGKILL)
    seconds, codes = ranks.ends()

    assert seconds < 10
    assert codes == [-signal.SIGKILL if r == victim else EXIT_PEER_LOST for r in range(3)]
    said = ranks.said()
    assert set(said) == {0, 1, 2} - {victim}
    assert all(f"rank {victim} " in failure for failure in said.values())


def test_a_rank_that_dies_before_its_first_step_is_named_by_all_others():
    ranks = Ranks(4, dies=1, late=(2, 3), steps=100)  # rank 0 hears of the death before them

    assert ranks.ends()[1] == [EXIT_PEER_LOST, -signal.SIGKILL, EXIT_PEER_LOST, EXIT_PEER_LOST]
    said = ranks.said()
    assert set(said) == {0, 2, 3}
    assert all("rank 1 on" in failure for failure in said.values())


@pytest.mark.faults
@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_was_stopped_is_named_after_its_limit(victim):
    ranks = Ranks(3)
    others = {0, 1, 2} - {victim}
    time.sleep(2.5)

    os.kill(ranks.processes[victim].pid, signal.SIGSTOP)
    began = time.monotonic()
    for rank in others:
        ranks.processes[rank].join(timeout=30)
    seconds = time.monotonic() - began
    os.kill(ranks.processes[victim].pid, signal.SIGKILL)
    ranks.ends()

    assert LIMIT - 2 < seconds < LIMIT + 5
    said = ranks.said()
    assert said.keys() >= others
    failure = said[min(others)]
    assert f"rank {victim} on {socket.gethostname()} hangs" in failure
    assert "limit 4 s" in failure


def test_a_hanging_rank_is_named_and_all_ranks_dump_their_stacks():
    ranks = Ranks(3, hang={2})

    seconds, codes = ranks.ends()

    assert seconds < 1 + LIMIT + 10
    assert codes == [EXIT_PEER_LOST] * 3
    assert all("rank 2 on" in failure for failure in ranks.said().values())
    stacks = [(ranks.stacks / f"rank_{rank:05d}.txt").read_text() for rank in range(3)]
    assert ["in stand_still" in text for text in stacks] == [False, False, True]
    assert all("rank 2 on" in text and "in work" in text for text in stacks)


@pytest.mark.faults
def test_a_hang_is_reported_if_a_rank_has_not_connected():
    ranks = Ranks(3, hang={0, 1, 2}, alone=2)
    for rank in (0, 1):
        ranks.processes[rank].join(timeout=30)
    codes = [process.exitcode for process in ranks.processes]
    ranks.processes[2].kill()
    ranks.ends()

    assert codes == [EXIT_PEER_LOST, EXIT_PEER_LOST, None]
    failure = ranks.said()[0]
    assert failure.startswith("every rank that rank 0 hears (2 of 3) hangs: no progress for ")


@pytest.mark.faults
def test_a_rank_connects_again_if_its_key_came_too_late():
    ranks = Ranks(3, silent=1, steps=60)

    assert ranks.ends()[1] == [0, 0, 0]
    assert ranks.said() == {}


@pytest.mark.faults
def test_attacks_on_the_port_of_rank_0_end_no_rank_and_hide_no_death():
    ranks = Ranks(4, alone=3)  # the port stays open, as one rank is missing
    _, host, port, key = ranks.address.get()
    draw = random.Random(45)
    strangers = [socket.create_connection((host, port)) for _ in range(300)]
    slow = strangers[:20]
    end = time.monotonic() + 3 * LIMIT
    while time.monotonic() < end:
        with contextlib.suppress(OSError):
            draw.choice(slow).sendall(key[:1].encode())
        with contextlib.suppress(OSError):
            stranger = socket.create_connection((host, port), timeout=0.1)
            strangers.append(stranger)
            stranger.sendall(draw.randbytes(draw.randrange(9000)))
        time.sleep(0.02)

    assert all(process.is_alive() for process in ranks.processes)
    assert ranks.said() == {}
    os.kill(ranks.processes[1].pid, signal.SIGKILL)
    began = time.monotonic()
    for rank in (0, 2):
        ranks.processes[rank].join(timeout=30)
    assert time.monotonic() - began < 10
    ranks.processes[3].kill()
    ranks.ends()
    said = ranks.said()
    assert said.keys() >= {0, 2}
    assert all("rank 1 " in failure for failure in said.values())
    for stranger in strangers:
        stranger.close()


def stop(health):
    """Ends as an error ends a rank, but only once the other rank has stopped too."""
    health.stop()
    time.sleep(3)


@pytest.mark.parametrize("end", [Health.close, pytest.param(stop, marks=pytest.mark.extended)])
def test_ranks_that_end_at_once_leave_no_thread_and_lose_no_rank(end):
    ranks = Ranks(2, steps=5, end=end)

    _, codes = ranks.ends()

    assert codes == [0, 0]
    assert ranks.said() == {}


@pytest.mark.parametrize(
    "sent",
    [
        b"\0\0\0\x08\xffSMBabcd",
        b"{}\n",
        b"[" * 4096 + b"\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"0123456789abcdef0123456789abcdef\n",
        b"\0\0",
    ],
)
def test_bytes_of_a_stranger_do_not_end_the_watchdog(sent):
    addresses = []
    health = Health(
        rank=0,
        world_size=2,
        timeout=0,
        broadcast=addresses.append,
        on_loss=print,
        stacks_folder=Path(),
    )
    with socket.create_connection(("127.0.0.1", addresses[0][2])) as stranger:
        stranger.sendall(sent)
        stranger.settimeout(10)
        with contextlib.suppress(ConnectionResetError):
            assert stranger.recv(1) == b""  # rank 0 hangs up

    assert health._thread.is_alive()
    assert health.failure is None
    health.stop()


def test_a_single_rank_is_not_watched():
    health = Health(
        rank=0,
        world_size=1,
        timeout=LIMIT,
        broadcast=lambda value: value,
        on_loss=print,
        stacks_folder=Path(),
    )

    health.heartbeat(step=1, phase="step")
    health.close()

    assert health.failure is None


@pytest.mark.faults
def test_rank_0_blocked_in_c_code_is_named_by_the_others(monkeypatch):
    hold_the_gil = ctypes.PyDLL(None).sleep
    monkeypatch.setattr(f"{__name__}.stand_still", lambda: hold_the_gil(60))
    ranks = Ranks(3, hang={0})

    for rank in (1, 2):
        ranks.processes[rank].join(timeout=30)
    os.kill(ranks.processes[0].pid, signal.SIGKILL)
    _, codes = ranks.ends()

    assert codes[1:] == [EXIT_PEER_LOST] * 2
    assert all(
        " hangs: " in failure and "rank 0 on" in failure for failure in ranks.said().values()
    )
