import logging
import multiprocessing
import os
import signal
import time
from pathlib import Path

import pytest

from llm.data import workers
from llm.data.workers import bounded_workers, run_tasks
from llm.errors import DataError

SPAWN = multiprocessing.get_context("spawn")


def run(tasks, work, processes):
    heard = []
    run_tasks(tasks, work, processes=processes, on_message=lambda *message: heard.append(message))
    return heard


@pytest.mark.parametrize(("wanted", "given"), [(None, 4), (3, 3), (4, 4), (10**20, 4)])
def test_there_are_no_more_workers_than_cores(monkeypatch, caplog, wanted, given):
    caplog.set_level(logging.INFO, "llm.data")
    monkeypatch.setattr(workers, "num_cores", lambda: 4)

    assert bounded_workers(wanted) == given
    cut = ["taking 4 workers, not 100,000,000,000,000,000,000: there are 4 cores"]
    assert caplog.messages == (cut if wanted == 10**20 else [])


def test_cores_are_those_that_this_process_may_use():
    """A batch system gives a job a part of the node."""
    if not hasattr(os, "sched_setaffinity"):
        pytest.skip("cores cannot be taken away here")
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        assert bounded_workers(100_000) == 1
    finally:
        os.sched_setaffinity(0, cores)


def square(task, send):
    send(("square", task * task))
    send(("process", os.getpid()))


def is_alive(pid):
    """Whether a process is there and has not ended, though nobody may have asked how."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until(true, seconds=20.0):
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it does not happen"
        time.sleep(0.02)


@pytest.mark.parametrize("processes", [0, 1, 2, 3, 20])
@pytest.mark.parametrize("tasks", [[], [5], [3, 1, 4, 15, 9]])
def test_every_task_is_done_once_and_says_so_last(tasks, processes):
    heard = run(tasks, square, processes)

    for task in tasks:
        messages = [message for number, message in heard if number == task]
        assert messages[0] == ("square", task * task)
        assert messages[1][0] == "process"
        assert messages[2:] == [None]
    assert len(heard) == 3 * len(tasks)


def test_without_processes_the_work_is_done_here_and_in_order():
    heard = run([3, 1], square, 0)

    assert [number for number, _ in heard] == [3, 3, 3, 1, 1, 1]
    assert {message[1] for _, message in heard if message and message[0] == "process"} == {
        os.getpid()
    }


@pytest.mark.parametrize("processes", [1, 2])
def test_with_processes_no_work_is_done_here(processes):
    heard = run([1, 2, 3, 4], square, processes)

    pids = {message[1] for _, message in heard if message and message[0] == "process"}
    assert os.getpid() not in pids
    assert not any(is_alive(pid) for pid in pids)


def test_a_free_worker_takes_the_next_task():
    def work(task, send):
        time.sleep(0.5 if task == 0 else 0.01)
        send(os.getpid())

    heard = run(list(range(11)), work, 2)

    pids = {number: message for number, message in heard if message is not None}
    assert len({pids[number] for number in range(1, 11)}) == 1
    assert pids[0] != pids[1]


@pytest.mark.parametrize("processes", [0, 1, 3])
def test_the_error_of_a_task_is_raised_here_and_the_others_are_stopped(tmp_path, processes):
    def work(task, send):
        (tmp_path / str(task)).touch()
        if task == 1:
            raise DataError("line 7 is broken")
        if task == 2:
            time.sleep(60)

    began = time.monotonic()
    with pytest.raises(DataError, match="line 7 is broken"):
        run([0, 1, 2, 3], work, processes)
    assert time.monotonic() - began < 20


@pytest.mark.parametrize("processes", [1, 2])
def test_a_worker_that_was_killed_is_one_sentence(processes):
    def work(task, send):
        if task == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(DataError, match=r"A worker was killed, .*fewer --workers: what is done is"):
        run([0, 1, 2, 3], work, processes)


def test_a_worker_that_is_killed_while_others_work_on_stops_them(tmp_path):
    def work(task, send):
        send(os.getpid())
        if task == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)

    pids = []
    with pytest.raises(DataError):
        run_tasks([0, 1], work, processes=2, on_message=lambda _, pid: pids.append(pid))

    assert not any(is_alive(pid) for pid in pids)


def orphans(folder):
    """What the first process does in the test below."""

    def work(task, send):
        (folder / f"{os.getpid()}.pid").touch()
        for _ in range(600):
            time.sleep(0.1)
            send("still at work")

    run_tasks([0, 1, 2], work, processes=3, on_message=lambda *_: None)


def test_no_worker_outlives_the_first_process(tmp_path):
    first = SPAWN.Process(target=orphans, args=(tmp_path,))
    first.start()
    wait_until(lambda: len(list(tmp_path.glob("*.pid"))) == 3)
    workers = [int(path.stem) for path in tmp_path.glob("*.pid")]
    assert all(map(is_alive, workers))

    os.kill(first.pid, signal.SIGKILL)
    first.join(20)

    wait_until(lambda: not any(map(is_alive, workers)))
