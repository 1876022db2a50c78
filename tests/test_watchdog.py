import multiprocessing
import os
import signal
import socket
import time

import pytest

from llm.watchdog import EXIT_PEER_LOST, Watchdog

CONTEXT = multiprocessing.get_context("fork")
LIMITS = {"start": 60.0, "step": 4.0, "evaluation": 60.0, "save": 60.0}


class Ranks:
    """Processes that watch one another; each makes a step every tenth of a second."""

    def __init__(self, world_size, *, steps=10_000):
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
                for _ in range(world_size - 1):
                    self.address.put(address)
                return address
            return self.address.get()

        watchdog = Watchdog(
            rank=rank,
            world_size=world_size,
            limits=LIMITS,
            share=share,
            on_loss=lambda verdict: self.verdicts.put((rank, verdict)),
        )
        for step in range(steps):
            watchdog.got_on(step=step, phase="step")
            time.sleep(0.1)
        watchdog.close()

    def ends(self):
        """Waits for all ranks but the first victim; returns seconds and exit codes."""
        began = time.monotonic()
        for process in self.processes:
            process.join(timeout=30)
        return time.monotonic() - began, [process.exitcode for process in self.processes]

    def said(self):
        found = {}
        while not self.verdicts.empty():
            rank, verdict = self.verdicts.get()
            found[rank] = verdict
        return found


@pytest.mark.parametrize("victim", [0, pytest.param(2, marks=pytest.mark.faults)])
def test_when_a_rank_dies_the_others_name_it_and_end_within_ten_seconds(victim):
    ranks = Ranks(3)
    time.sleep(2.5)

    os.kill(ranks.processes[victim].pid, signal.SIGKILL)
    seconds, codes = ranks.ends()

    assert seconds < 10
    assert codes == [-signal.SIGKILL if r == victim else EXIT_PEER_LOST for r in range(3)]
    said = ranks.said()
    assert set(said) == {0, 1, 2} - {victim}
    assert all(f"rank {victim} " in verdict for verdict in said.values())


def test_a_rank_that_was_stopped_is_named_after_its_limit():
    ranks = Ranks(3)
    time.sleep(2.5)

    os.kill(ranks.processes[1].pid, signal.SIGSTOP)
    began = time.monotonic()
    for rank in (0, 2):
        ranks.processes[rank].join(timeout=30)
    seconds = time.monotonic() - began
    os.kill(ranks.processes[1].pid, signal.SIGKILL)
    ranks.ends()

    assert LIMITS["step"] - 2 < seconds < LIMITS["step"] + 5
    said = ranks.said()
    assert said.keys() >= {0, 2}
    assert "rank 1 on" in said[0]
    assert "hangs" in said[0]
    assert "limit 4 s" in said[0]


def test_ranks_that_end_in_good_order_are_not_missed():
    ranks = Ranks(2, steps=5)

    _, codes = ranks.ends()

    assert codes == [0, 0]
    assert ranks.said() == {}


def test_a_single_rank_is_not_watched():
    watchdog = Watchdog(
        rank=0, world_size=1, limits=LIMITS, share=lambda value: value, on_loss=print
    )

    watchdog.got_on(step=1, phase="step")
    watchdog.close()

    assert watchdog.verdict is None


@pytest.mark.faults
def test_the_first_rank_is_missed_like_any_other_when_it_was_stopped():
    ranks = Ranks(3)
    time.sleep(2.5)

    os.kill(ranks.processes[0].pid, signal.SIGSTOP)
    began = time.monotonic()
    for rank in (1, 2):
        ranks.processes[rank].join(timeout=30)
    seconds = time.monotonic() - began
    os.kill(ranks.processes[0].pid, signal.SIGKILL)
    ranks.ends()

    assert LIMITS["step"] - 2 < seconds < LIMITS["step"] + 5
    said = ranks.said()
    assert said.keys() >= {1, 2}
    assert f"rank 0 on {socket.gethostname()} hangs" in said[1]
    assert "limit 4 s" in said[1]
