"""Ranks from the variables that schedulers set, as seen on Slurm 22.05 and MPICH 4.0."""

import os
import subprocess
import sys

import pytest

from llm.errors import ParallelError
from llm.runtime.srun_shell import is_interactive_shell
from llm.runtime.world import (
    World,
    device_of,
    expand_nodelist,
    is_on_one_host,
    ranks_per_node,
    read_job_hosts,
    read_rank_variables,
    set_torchrun_variables,
    world_from_environment,
)

BATCH_SCRIPT = {
    "SLURM_JOB_ID": "41",
    "SLURM_JOB_NODELIST": "node[1-2]",
    "SLURMD_NODENAME": "node1",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
}
TASK_3_OF_4 = {
    **BATCH_SCRIPT,
    "SLURMD_NODENAME": "node2",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "node[1-2]",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
}
RANK_3_OF_4 = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}
UNDER_TORCHRUN = {
    "RANK": "1",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "MASTER_ADDR": "node1",
    "MASTER_PORT": "41001",
}


@pytest.fixture
def environ(monkeypatch):
    """An environment without a launcher, for this test only."""
    for name in list(os.environ):
        if name.startswith(("SLURM", "PBS", "PMI", "PALS", "MPI", "OMPI", "MASTER", "RANK")):
            monkeypatch.delenv(name)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")  # so that what set_torchrun_variables sets is undone
        monkeypatch.delenv(name)
    return monkeypatch


@pytest.mark.parametrize(
    "variables",
    [
        TASK_3_OF_4,
        {"PALS_RANKID": "3", "PMI_RANK": "3", "PMI_SIZE": "4", "PALS_LOCAL_RANKID": "1"},
        {"PMI_RANK": "3", "PMI_SIZE": "4", "PMI_LOCAL_RANK": "1"},
        {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1"},
        {
            "OMPI_COMM_WORLD_RANK": "3",
            "OMPI_COMM_WORLD_SIZE": "4",
            "OMPI_COMM_WORLD_LOCAL_RANK": "1",
        },
    ],
    ids=["srun", "PALS", "Cray", "Hydra", "Open MPI"],
)
def test_a_task_of_srun_or_mpiexec_is_a_rank(variables):
    assert read_rank_variables(variables) == RANK_3_OF_4


def test_mpirun_in_a_slurm_job_counts_ranks_itself():
    # It starts one daemon a node through srun, whose variables its ranks inherit.
    daemon = {**TASK_3_OF_4, "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1"}
    rank = {"PMI_RANK": "6", "PMI_SIZE": "8", "MPI_LOCALRANKID": "2", **daemon}
    assert read_rank_variables(rank) == {"RANK": "6", "WORLD_SIZE": "8", "LOCAL_RANK": "2"}


def test_a_batch_script_is_one_process_although_it_has_a_procid():
    assert read_rank_variables(BATCH_SCRIPT) == {}


def test_a_batch_script_submitted_from_within_a_step_is_one_process():
    inherited = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NODELIST": "node7"}
    assert read_rank_variables({**BATCH_SCRIPT, **inherited}) == {}
    inherited = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "node[1-2]"}
    assert read_rank_variables({**BATCH_SCRIPT, **inherited}) == {}


def test_a_step_or_mpiexec_of_one_process_has_world_size_1():
    assert (
        read_rank_variables({**TASK_3_OF_4, "SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "1"}) == {}
    )
    assert read_rank_variables({"PMI_RANK": "0", "PMI_SIZE": "1", "MPI_LOCALRANKID": "0"}) == {}


def test_ranks_of_torchrun_within_a_task_are_left_as_they_are(environ):
    before = {**TASK_3_OF_4, **UNDER_TORCHRUN}
    for name, value in before.items():
        environ.setenv(name, value)
    assert read_rank_variables(before) == {}
    set_torchrun_variables()
    assert {name: os.environ[name] for name in before} == before


def test_srun_variables_give_torch_its_ranks_and_the_address_of_rank_0(environ):
    for name, value in TASK_3_OF_4.items():
        environ.setenv(name, value)
    set_torchrun_variables()
    told = {name: os.environ[name] for name in UNDER_TORCHRUN}
    assert told == {**RANK_3_OF_4, "MASTER_ADDR": "node1", "MASTER_PORT": "21050"}


def test_every_job_and_step_has_a_separate_port(environ):
    ports = set()
    for job, step in (("41", "0"), ("41", "1"), ("42", "0")):
        environ.delenv("MASTER_PORT", raising=False)
        for name, value in {**TASK_3_OF_4, "SLURM_JOB_ID": job, "SLURM_STEP_ID": step}.items():
            environ.setenv(name, value)
        set_torchrun_variables()
        ports.add(int(os.environ["MASTER_PORT"]))
    assert len(ports) == 3
    assert all(20000 <= port < 30000 for port in ports)


def test_variables_that_a_script_exports_are_kept(environ):
    exported = {"RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "10.1.2.3", "MASTER_PORT": "3442"}
    for name, value in {**TASK_3_OF_4, **exported}.items():
        environ.setenv(name, value)
    set_torchrun_variables()
    assert {name: os.environ[name] for name in exported} == exported
    assert os.environ["LOCAL_RANK"] == "1"


def test_under_mpiexec_rank_0_is_on_the_first_host_of_the_job(environ, tmp_path):
    nodes = tmp_path / "nodes"
    nodes.write_text("x3001.hsn\nx3001.hsn\nx3002.hsn\n")
    environ.setenv("PBS_NODEFILE", str(nodes))
    environ.setenv("PBS_JOBID", "1234567.polaris-pbs-01")
    for name, value in {"PMI_RANK": "3", "PMI_SIZE": "4", "PALS_LOCAL_RANKID": "1"}.items():
        environ.setenv(name, value)
    environ.setenv("PALS_RANKID", "3")
    set_torchrun_variables()
    assert (os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]) == ("x3001.hsn", "25576")
    assert read_job_hosts(os.environ) == ["x3001.hsn", "x3002.hsn"]


def test_mpiexec_on_one_machine_needs_no_address(environ):
    hydra = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
    for name, value in hydra.items():
        environ.setenv(name, value)
    set_torchrun_variables()
    assert (os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]) == ("127.0.0.1", "29500")


def test_mpiexec_on_unknown_hosts_asks_for_the_address(environ):
    hydra = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "1"}
    for name, value in hydra.items():
        environ.setenv(name, value)
    with pytest.raises(ParallelError, match="export MASTER_ADDR"):
        set_torchrun_variables()


@pytest.mark.parametrize(
    ("short", "names"),
    [
        ("node7", ["node7"]),
        ("node[1-2]", ["node1", "node2"]),
        ("nid[001008-001010,2],login1", ["nid001008", "nid001009", "nid001010", "nid2", "login1"]),
        ("r[1-2]n[3-4]-ib", ["r1n3-ib", "r1n4-ib", "r2n3-ib", "r2n4-ib"]),
    ],
)
def test_slurm_host_lists_are_expanded(short, names):
    assert expand_nodelist(short) == names


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, 8),  # nobody says: one machine
        ({**UNDER_TORCHRUN, "LOCAL_WORLD_SIZE": "4"}, 4),
        ({"PMI_RANK": "3", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}, 2),
        ({**TASK_3_OF_4, "SLURM_STEP_NUM_TASKS": "8", "SLURM_NTASKS": "8"}, 4),
        (BATCH_SCRIPT, 8),  # which is not one of the step's tasks
    ],
)
def test_ranks_per_node_are_counted(variables, expected):
    assert ranks_per_node(variables, 8) == expected


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({**UNDER_TORCHRUN, "LOCAL_WORLD_SIZE": "8"}, True),
        ({**UNDER_TORCHRUN, "LOCAL_WORLD_SIZE": "4"}, False),
        # A controller of pods may export it on rank 0 alone, so it does not tell.
        ({**UNDER_TORCHRUN, "MASTER_ADDR": "localhost"}, False),
        ({"PMI_RANK": "3", "PMI_SIZE": "8", "MPI_LOCALRANKID": "3", "MPI_LOCALNRANKS": "8"}, True),
        ({**TASK_3_OF_4, "SLURM_STEP_NUM_TASKS": "8", "SLURM_NTASKS": "8"}, False),
        ({**TASK_3_OF_4, "SLURM_STEP_NODELIST": "node2"}, True),
    ],
)
def test_all_ranks_are_on_one_host_only_if_the_launcher_says_so(variables, expected):
    assert is_on_one_host(variables, 8) is expected


def test_a_task_of_srun_has_its_rank_without_torchrun(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SLURM_PROCID", "5")
    monkeypatch.setenv("SLURM_LOCALID", "1")
    assert world_from_environment() == World(rank=0, local_rank=0, world_size=1)
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "8")
    assert world_from_environment() == World(rank=5, local_rank=1, world_size=8)


@pytest.mark.parametrize(
    ("variables", "sentence"),
    [
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE is 2, and RANK is not set: unset WORLD_SIZE to train"),
        ({"WORLD_SIZE": "2", "RANK": "y"}, "variable RANK is 'y', not a whole number: unset it"),
        ({"WORLD_SIZE": "x", "RANK": "0"}, "variable WORLD_SIZE is 'x', not a whole number"),
        ({"LOCAL_RANK": ""}, "variable LOCAL_RANK is '', not a whole number"),
        ({"WORLD_SIZE": "2", "RANK": "2"}, "RANK is 2, and WORLD_SIZE 2 allows ranks up to 1"),
        ({"RANK": "1"}, "RANK is 1, and WORLD_SIZE is not set: unset RANK to train with one"),
        ({"RANK": "0", "WORLD_SIZE": "0"}, "WORLD_SIZE is 0, and at least one process trains"),
        ({"PMI_RANK": "0", "PMI_SIZE": "x", "PMI_LOCAL_RANK": "0"}, "variable PMI_SIZE is 'x'"),
        ({**TASK_3_OF_4, "SLURM_STEP_NUM_TASKS": "x"}, "variable SLURM_STEP_NUM_TASKS is 'x'"),
        ({"WORLD_SIZE": "2", "RANK": "0"}, "MASTER_ADDR and MASTER_PORT do not say where rank 0"),
        ({**UNDER_TORCHRUN, "MASTER_PORT": "h"}, "variable MASTER_PORT is 'h', not a whole number"),
        ({**UNDER_TORCHRUN, "MASTER_PORT": "0"}, "MASTER_PORT is 0, and ports have numbers from 1"),
        ({**UNDER_TORCHRUN, "MASTER_PORT": "65536"}, "MASTER_PORT is 65536, and ports have numb"),
    ],
)
def test_variables_that_are_no_launchers_are_refused(environ, variables, sentence):
    for name, value in variables.items():
        environ.setenv(name, value)
    with pytest.raises(ParallelError, match=sentence):
        set_torchrun_variables()


def test_the_trainer_refuses_such_variables_in_one_sentence(environ):
    environ.setenv("WORLD_SIZE", "2")
    done = subprocess.run(
        [sys.executable, "-m", "llm.trainers.gpt"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stdout == (
        "error: WORLD_SIZE is 2, and RANK is not set: unset WORLD_SIZE to train with one process, "
        "or start the processes with torchrun, srun or mpiexec.\n"
    )


@pytest.mark.parametrize(
    ("command", "is_interactive"),
    [
        (["bash"], True),
        (["-bash"], True),
        (["/usr/bin/zsh", "-l", "-i"], True),
        (["bash", "run.sh"], False),
        (["bash", "-c", "llm-trainers train"], False),
        (["python", "-m", "llm.trainers.gpt"], False),
    ],
)
def test_a_shell_without_a_script_reads_commands_from_its_user(command, is_interactive):
    assert is_interactive_shell(command) is is_interactive


PRINT_WORLD = (
    "from llm.runtime.world import world_from_environment as read; print(read().world_size)"
)


def world_size_in(shell, environment):
    """The number of ranks that Python sees, started by a line that a shell reads or runs."""
    line = f"{sys.executable} -c '{PRINT_WORLD}'; true"
    typed = shell == ["bash"]
    run = subprocess.run(
        [*shell, *([] if typed else [line])],
        input=line if typed else None,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return int(run.stdout)


def test_the_shell_of_srun_has_one_rank():
    terminal = {**TASK_3_OF_4, "SLURM_PROCID": "0", "SLURM_PTY_PORT": "40001"}

    assert world_size_in(["bash"], terminal) == 1
    assert world_size_in(["bash", "-c"], terminal) == 4  # the task of a job step
    assert world_size_in(["bash"], TASK_3_OF_4) == 4


def test_the_variable_of_accelerate_chooses_the_cpu_of_a_machine_with_gpus(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    world = World(rank=3, local_rank=3, world_size=4)
    assert str(device_of(world)) == "cuda:1"

    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    assert str(device_of(world)) == "cpu"
