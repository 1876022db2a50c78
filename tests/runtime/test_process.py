import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from llm.runtime.cpu import limit_spin_wait
from llm.runtime.rng import draw_seed, seed_step
from llm.runtime.world import World, launch_id, world_from_environment


def draw(**key) -> list[float]:
    seed_step(**key)
    return torch.rand(4).tolist()


def test_the_draws_of_a_step_depend_on_seed_step_and_rank_alone():
    first = draw(seed=1, step=5, rank=0)
    torch.rand(100)
    assert draw(seed=1, step=5, rank=0) == first
    for other in ({"seed": 2, "step": 5, "rank": 0}, {"seed": 1, "step": 6, "rank": 0}):
        assert draw(**other) != first
    assert draw(seed=1, step=5, rank=1) != first


def test_processes_of_one_launch_draw_the_same_seed(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("MASTER_PORT", "1234")
    seeds = set()
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        seeds.add(draw_seed())
    assert len(seeds) == 1
    monkeypatch.setenv("MASTER_PORT", "5678")
    assert draw_seed() not in seeds


def test_a_process_alone_draws_another_seed_each_time(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert launch_id() is None
    assert len({draw_seed() for _ in range(5)}) == 5


def test_a_task_of_srun_knows_its_place_without_torchrun(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SLURM_PROCID", "5")
    monkeypatch.setenv("SLURM_LOCALID", "1")
    assert world_from_environment() == World(rank=0, local_rank=0, world_size=1)
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "8")
    assert world_from_environment() == World(rank=5, local_rank=1, world_size=8)
    assert launch_id() is not None


@pytest.fixture
def no_spin_count(monkeypatch):
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    yield
    os.environ.pop("GOMP_SPINCOUNT", None)


def test_waiting_threads_sleep_soon_where_another_process_wants_the_cores(
    no_spin_count, monkeypatch
):
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.setattr(Path, "read_text", lambda self: "0.00 0.00 0.00 2/80 1234")

    limit_spin_wait()

    assert os.environ["GOMP_SPINCOUNT"] == "1000"


def test_waiting_threads_sleep_soon_where_ranks_share_the_machine(no_spin_count, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr(Path, "read_text", lambda self: "0.00 0.00 0.00 1/80 1234")

    limit_spin_wait()

    assert os.environ["GOMP_SPINCOUNT"] == "1000"


def test_alone_on_the_machine_they_spin_as_by_default(no_spin_count, monkeypatch):
    monkeypatch.setattr(Path, "read_text", lambda self: "1.90 1.00 0.50 1/80 1234")

    limit_spin_wait()

    assert "GOMP_SPINCOUNT" not in os.environ


def test_what_the_user_says_of_threads_holds(monkeypatch):
    monkeypatch.setenv("GOMP_SPINCOUNT", "7")

    limit_spin_wait()

    assert os.environ["GOMP_SPINCOUNT"] == "7"


SIGNALLED = """
import os, signal
from llm.runtime.signals import Interruption
signal.signal(signal.SIGINT, signal.SIG_IGN)  # as in a background job of a script
interruption = Interruption()
interruption.watch()
os.kill(os.getpid(), signal.SIGINT)
print(interruption.reason)
"""


@pytest.mark.parametrize(
    ("launched", "reason"),
    [({}, "None"), ({"TORCHELASTIC_RUN_ID": "1"}, "SIGINT")],
    ids=["by hand", "by torchrun"],
)
def test_a_background_job_ignores_ctrl_c_unless_torchrun_passes_it_on(launched, reason):
    command = [sys.executable, "-c", SIGNALLED]
    environment = {**os.environ, **launched}
    assert subprocess.check_output(command, env=environment, text=True).strip() == reason


# The first process starts a second one and ends. The second prints why it shall stop, if ever.
ORPHANED = """
import os, sys, time
from llm.runtime.signals import Interruption, watch_launcher
is_watched, tell = os.pipe()
if os.fork():
    os.read(is_watched, 1)
    os._exit(0)
interruption = Interruption()
interruption.watch()
watch_launcher()
os.write(tell, b".")
end = time.monotonic() + float(sys.argv[1])
while interruption.reason is None and time.monotonic() < end:
    time.sleep(0.1)
print(interruption.reason, flush=True)
"""


@pytest.mark.parametrize(
    ("launched", "seconds", "reason"),
    [({}, 3, "None"), ({"TORCHELASTIC_RUN_ID": "1"}, 60, "the death of its launcher")],
    ids=["by hand", "by torchrun"],
)
def test_only_a_rank_stops_when_the_process_that_started_it_dies(launched, seconds, reason):
    command = [sys.executable, "-c", ORPHANED, str(seconds)]
    environment = {**os.environ, **launched}
    assert subprocess.check_output(command, env=environment, text=True).strip() == reason
