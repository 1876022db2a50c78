"""Where the members of a sweep run, and the words that start them there."""

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from llm.errors import ConfigError
from llm.tools.sweep.slots import Slot, find_slots

SLURM = {"SLURM_JOB_ID": "17", "SLURM_JOB_NODELIST": "n[1-5]", "SLURMD_NODENAME": "n1"}


def test_members_get_disjoint_nodes_of_a_slurm_job(capsys):
    slots = find_slots(SLURM, nodes=2, nproc_per_node=4, folder=Path("s"))
    assert capsys.readouterr().err == (
        "A member takes 2 nodes, so this job has 1 node without work: n5.\n"
    )
    assert [slot.hosts for slot in slots] == [("n1", "n2"), ("n3", "n4")]
    command = slots[1].command(["--seed=1"], nproc_per_node=4)
    assert command[:6] == [
        *("srun", "--overlap", "--nodes=2", "--ntasks=2", "--ntasks-per-node=1"),
        "--nodelist=n3,n4",
    ]
    assert "--rdzv_endpoint=n3:20019" in command
    assert command[-3:] == ["-m", "llm.trainers.gpt", "--seed=1"]


def test_members_get_disjoint_nodes_of_a_pbs_job(tmp_path):
    (tmp_path / "nodes").write_text("x1\nx1\nx2\n")
    job = {"PBS_JOBID": "17.polaris", "PBS_NODEFILE": str(tmp_path / "nodes")}
    slots = find_slots(job, nodes=1, nproc_per_node=4, folder=tmp_path / "s")
    assert [slot.hosts for slot in slots] == [("x1",), ("x2",)]
    command = slots[1].command(["--seed=1"], nproc_per_node=4)
    host_file = tmp_path / "s/.hosts-17-x2"
    assert command[:7] == ["mpiexec", "--hostfile", str(host_file), "-n", "1", "--ppn", "1"]
    assert host_file.read_text() == "x2\n"
    assert "--standalone" in command


@pytest.mark.parametrize(
    ("installed_path", "binding"),
    [("opt/cray/pals/1.3.4/bin/mpiexec", ["--cpu-bind", "none"]), ("opt/mpich/bin/mpiexec", [])],
)
def test_mpiexec_of_pals_binds_no_rank_to_a_core(installed_path, binding, tmp_path):
    mpiexec = tmp_path / installed_path
    mpiexec.parent.mkdir(parents=True)
    mpiexec.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" > {shlex.quote(str(tmp_path / "words"))}\n')
    mpiexec.chmod(0o755)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/mpiexec").symlink_to(mpiexec)
    (tmp_path / "nodes").write_text("x1\nx2\nx3\nx4\n")
    job = {"PBS_JOBID": "17.polaris", "PBS_NODEFILE": str(tmp_path / "nodes")}
    job["PATH"] = f"{tmp_path / 'bin'}:/usr/bin:/bin"

    slots = find_slots(job, nodes=2, nproc_per_node=4, folder=tmp_path / "s")
    subprocess.run(slots[1].command(["--seed=1"], nproc_per_node=4), env=job, check=True)
    words = (tmp_path / "words").read_text().splitlines()
    host_file = str(tmp_path / "s/.hosts-17-x3")
    launcher = ["--hostfile", host_file, "-n", "2", "--ppn", "1", *binding]
    assert words[: len(launcher) + 3] == [*launcher, sys.executable, "-m", "torch.distributed.run"]


@pytest.mark.parametrize(
    ("job", "core_options"),
    [
        ({}, []),  # the step has all cores
        ({"SLURM_CPUS_PER_TASK": "64", "SLURM_TASKS_PER_NODE": "1(x5)"}, ["--cpus-per-task=64"]),
        ({"SLURM_CPUS_PER_TASK": "16", "SLURM_TASKS_PER_NODE": "4(x5)"}, ["--cpus-per-task=64"]),
        ({"SLURM_CPUS_PER_TASK": "8", "SLURM_TASKS_PER_NODE": "4(x4),3"}, ["--cpus-per-task=24"]),
    ],
)
def test_srun_gives_a_member_all_cores_of_the_job_on_its_nodes(job, core_options):
    slots = find_slots({**SLURM, **job}, nodes=1, nproc_per_node=4, folder=Path("s"))
    assert slots[4].launcher[5:] == (
        *("--nodelist=n5", "--kill-on-bad-exit=1", "--cpu-bind=none"),
        *core_options,
    )


@pytest.mark.parametrize(("nodes", "nproc_per_node"), [(1, 12), (1, "auto"), (2, 1)])
def test_torchrun_is_refused_where_mpiexec_must_start_ranks(nodes, nproc_per_node, tmp_path):
    (tmp_path / "nodes").write_text("x1\nx2\n")
    job = {"PBS_JOBID": "17.aurora", "PBS_NODEFILE": str(tmp_path / "nodes")}
    pmix = {**job, "CCL_PROCESS_LAUNCHER": "pmix"}
    with pytest.raises(ConfigError, match="use llm-trainers jobs sweep pbs --site aurora, which"):
        find_slots(pmix, nodes=nodes, nproc_per_node=nproc_per_node, folder=tmp_path)
    # A member of one process takes no torchrun, and oneCCL may have another launcher.
    assert len(find_slots(pmix, nodes=1, nproc_per_node=1, folder=tmp_path)) == 2
    assert len(find_slots(job, nodes=1, nproc_per_node=12, folder=tmp_path)) == 2


def test_two_jobs_on_one_node_have_separate_files_of_hosts(tmp_path):
    for job in ("17", "18"):
        (tmp_path / job).write_text(f"x1\nx{job}\n")
        environ = {"PBS_JOBID": f"{job}.polaris", "PBS_NODEFILE": str(tmp_path / job)}
        [slot] = find_slots(environ, nodes=2, nproc_per_node=4, folder=tmp_path / "s")
        assert slot.launcher[2] == str(tmp_path / f"s/.hosts-{job}-x1")
    assert (tmp_path / "s/.hosts-17-x1").read_text() == "x1\nx17\n"


def test_a_machine_and_a_job_of_one_node_run_one_member_after_another():
    one_node = {**SLURM, "SLURM_JOB_NODELIST": "n1"}
    for environ in ({}, one_node):
        assert find_slots(environ, nodes=1, nproc_per_node=4, folder=Path("s")) == [Slot()]
    assert Slot().command(["--seed=1"], nproc_per_node=1)[1:] == ["-m", "llm", "train", "--seed=1"]
    assert "--nproc_per_node=auto" in Slot().command([], nproc_per_node="auto")
    # salloc's shell is on the login node.
    login = {name: value for name, value in one_node.items() if name != "SLURMD_NODENAME"}
    [slot] = find_slots(login, nodes=1, nproc_per_node=4, folder=Path("s"))
    assert slot.hosts == ("n1",)
