import logging
import multiprocessing
import os
import signal
import time
from pathlib import Path

import pytest

from llm.data.workers import limit_workers
from llm.errors import DataError
from llm.prepare import tokenize_shards
from llm.prepare.tokenize_shards import run_in_processes
from tests.support.processes import is_alive, wait_until

SPAWN = multiprocessing.get_context("spawn")


@pytest.mark.parametrize(("wanted", "given"), [(None, 4), (3, 3), (4, 4), (10**20, 4)])
def test_there_are_no_more_workers_than_cores(monkeypatch, caplog, wanted, given):
    caplog.set_level(logging.INFO, "llm.data")
    monkeypatch.setattr("llm.data.workers.num_cores", lambda: 4)

    assert limit_workers(wanted) == given
    cut = ["taking 4 workers, not 100,000,000,000,000,000,000: there are 4 cores"]
    assert caplog.messages == (cut if wanted == 10**20 else [])


def test_the_number_of_cores_respects_the_cpu_affinity():
    """A batch system gives a job a part of the node."""
    if not hasattr(os, "sched_setaffinity"):
        pytest.skip("cores cannot be taken away here")
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        assert limit_workers(100_000) == 1
    finally:
        os.sched_setaffinity(0, cores)


def run(tasks, work, processes, report=lambda: None):
    run_in_processes(work, tasks, num_processes=processes, on_progress=report)


def leave_pid(folder):
    """Work that says in a file of its name which process does it."""
    return lambda task: (folder / str(task)).write_text(str(os.getpid()))


def pids_in(folder):
    return {int(path.name): int(path.read_text() or 0) for path in folder.iterdir()}


@pytest.mark.parametrize("processes", [1, 2, 20])
@pytest.mark.parametrize("tasks", [[5], [3, 1, 4, 15, 9]])
def test_every_task_runs_in_a_worker_process_and_all_workers_end(tmp_path, tasks, processes):
    run(tasks, leave_pid(tmp_path), processes)

    pids = pids_in(tmp_path)
    assert sorted(pids) == sorted(tasks)
    assert os.getpid() not in pids.values()
    assert not any(map(is_alive, pids.values()))


def test_a_free_worker_takes_the_next_task(tmp_path):
    def work(task):
        time.sleep(0.5 if task == 0 else 0.01)
        leave_pid(tmp_path)(task)

    run(list(range(11)), work, 2)

    pids = pids_in(tmp_path)
    assert len({pids[number] for number in range(1, 11)}) == 1
    assert pids[0] != pids[1]


def test_the_parent_process_checks_progress_during_the_work_and_at_the_end(tmp_path, monkeypatch):
    monkeypatch.setattr(tokenize_shards, "_PROGRESS_SECONDS", 0.05)
    seen = []

    def work(task):
        leave_pid(tmp_path)(task)
        time.sleep(0.5)

    run([0, 1], work, 1, report=lambda: seen.append(len(pids_in(tmp_path))))

    assert {1, 2} <= set(seen)
    assert seen[-1] == 2


@pytest.mark.parametrize("processes", [1, 3])
def test_an_error_in_a_worker_is_raised_and_stops_the_others(processes):
    def work(task):
        if task == 1:
            raise DataError("line 7 is broken")
        if task == 2:
            time.sleep(60)

    began = time.monotonic()
    with pytest.raises(DataError, match="line 7 is broken"):
        run([0, 1, 2, 3], work, processes)
    assert time.monotonic() - began < 20
    assert multiprocessing.active_children() == []


def test_a_killed_worker_is_reported_in_one_sentence_and_stops_the_others(tmp_path):
    def work(task):
        leave_pid(tmp_path)(task)
        if task == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)

    with pytest.raises(
        DataError, match=r"A worker was killed, .*with fewer --workers \(of a run: "
    ):
        run([0, 1, 2, 3], work, 2)

    assert not any(map(is_alive, pids_in(tmp_path).values()))


def orphans(folder):
    """What the first process does in the test below: three workers, one without a task."""
    run([0, 1], lambda task: leave_pid(folder)(task) and time.sleep(60), 3)


def test_no_worker_outlives_its_parent(tmp_path):
    first = SPAWN.Process(target=orphans, args=(tmp_path,))
    first.start()
    children = Path(f"/proc/{first.pid}/task/{first.pid}/children")
    wait_until(lambda: len(list(tmp_path.iterdir())) == 2)
    forked = [int(pid) for pid in children.read_text().split()]
    assert set(pids_in(tmp_path).values()) <= set(forked)

    os.kill(first.pid, signal.SIGKILL)
    first.join(20)

    wait_until(lambda: not any(map(is_alive, forked)))
