"""Scripts for PBS: the torchruns of a job, and chains of jobs."""

import subprocess
from pathlib import Path

import pytest

from llm.tools.jobs import jobs
from llm.tools.jobs.jobs import main

TRAINER = ["--model_name_or_path", "gpt2", "--train_file", "a.txt", "--output_dir", "runs/a"]
PBS = ["pbs", "--account", "me", "--queue", "q", "--nodes", "2"]

# mpiexec starts its program twice, with the variable of a launcher.
PROFILE = """
mpiexec() {
    while [[ "$1" != bash && "$1" != python ]]; do shift; done
    for rank in 0 1; do env "$LAUNCHER=$rank" "$@"; done
}
python() { :; }
llm-trainers() { echo runs/a; }
"""


def write(folder: Path, *argv: str) -> Path:
    script = folder / "job.pbs"
    assert main([*argv, "--output", str(script), "--", *TRAINER]) == 0
    return script


def start(folder: Path, script: Path, nodes: str, launcher: str) -> subprocess.CompletedProcess:
    """Run a script on made-up nodes, where torchrun writes its arguments to a file."""
    (folder / "venv/bin").mkdir(parents=True)
    (folder / "venv/bin/activate").write_text(f"PATH={folder}/venv/bin:$PATH\n")
    for name, line in {"torchrun": 'echo "$*" >> torchruns', "python": ":"}.items():
        program = folder / "venv/bin" / name
        program.write_text(f"#!/bin/sh\n{line}\n")
        program.chmod(0o755)
    (folder / "profile").write_text(PROFILE)
    (folder / "nodes").write_text(nodes)
    variables = {
        "PATH": "/usr/bin:/bin",
        "BASH_ENV": str(folder / "profile"),
        "LAUNCHER": launcher,
        "PBS_JOBID": "7.server",
        "PBS_NODEFILE": str(folder / "nodes"),
    }
    return subprocess.run(
        ["bash", script], cwd=folder, env=variables, capture_output=True, text=True
    )


def start_torchruns(folder: Path, script: Path, launcher: str) -> list[str]:
    """Run a script on three nodes; return the arguments of each torchrun."""
    done = start(folder, script, "node1\nnode2\nnode3\n", launcher)
    assert done.returncode == 0, done.stderr
    return (folder / "torchruns").read_text().splitlines()


@pytest.mark.parametrize("launcher", ["PALS_RANKID", "PMI_RANK", "OMPI_COMM_WORLD_RANK"])
def test_the_first_torchrun_of_mpiexec_hosts_the_store(launcher, tmp_path):
    first, second = start_torchruns(tmp_path, write(tmp_path, *PBS), launcher)
    assert first.startswith("--rdzv_conf=is_host=1 --nnodes=3 ")
    assert second == first.replace("is_host=1", "is_host=0")
    assert " --rdzv_endpoint=node1:20007 " in first


def test_the_store_is_on_the_first_healthy_node_of_a_job_with_spares(tmp_path):
    script = write(tmp_path, *PBS, "--spare_nodes", "1")
    (tmp_path / "runs/a").mkdir(parents=True)
    (tmp_path / "runs/a/bad_nodes.txt").write_text("node1\n")
    first, second = start_torchruns(tmp_path, script, "PMI_RANK")
    assert first.startswith("--rdzv_conf=is_host=1 --nnodes=2 ")
    assert second.startswith("--rdzv_conf=is_host=0 --nnodes=2 ")
    assert " --rdzv_endpoint=node2:20007 " in first


def test_torchrun_decides_under_a_launcher_that_sets_no_rank(tmp_path):
    first, _ = start_torchruns(tmp_path, write(tmp_path, *PBS), "OTHER_RANK")
    assert first.startswith("--nnodes=3 ")


def test_a_job_with_fewer_nodes_than_its_script_says_what_to_do(tmp_path):
    script = write(tmp_path, *PBS, "--spare_nodes", "1")
    done = start(tmp_path, script, "node1\n", "PMI_RANK")
    assert done.returncode == 2
    assert done.stderr == (
        "The job has 1 of the 2 nodes that this script needs. For fewer nodes, write another "
        "script by llm-trainers jobs with --nodes.\n"
    )


def write_chain(folder: Path, monkeypatch, capsys, hours: float | None, *argv: str) -> list[str]:
    """Write a script for a chain with a made-up plan; return what the program says."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(jobs, "plan_run", lambda *_: ([], hours))
    options = ["--site", "polaris", "--account", "me", "--chain", "--output", "gpt.pbs"]
    assert main([*options, *argv, "--", *TRAINER]) == 0
    return capsys.readouterr().err.splitlines()


@pytest.mark.parametrize(("hours", "num_jobs"), [(None, 4), (1.0, 2), (27.6, 11), (27.4, 10)])
def test_a_chain_has_the_jobs_that_the_plan_needs(hours, num_jobs, tmp_path, monkeypatch, capsys):
    """Each job of 3 hours trains for 2.75."""
    *_, note = write_chain(tmp_path, monkeypatch, capsys, hours, "--nodes", "16", "--time", "180")
    assert note.startswith(f"Submit the chain of {num_jobs} jobs: JOB=$(qsub gpt.pbs) && for _ in ")
    command = note.partition(": ")[2]
    assert f"{{2..{num_jobs}}}" in command
    assert f"#     {command}\n" in (tmp_path / "gpt.pbs").read_text()


@pytest.mark.parametrize(("accepted", "calls"), [(0, 1), (2, 3), (9, 4)])
def test_submitting_a_chain_ends_at_the_first_job_that_qsub_refuses(
    accepted, calls, tmp_path, monkeypatch, capsys
):
    *_, note = write_chain(tmp_path, monkeypatch, capsys, None, "--nodes", "16", "--time", "180")
    qsub = 'qsub() { echo "$*" >> calls; n=$(wc -l < calls); ((n <= ACCEPTED)) && echo $n.pbs; }'
    subprocess.run(
        ["bash", "-c", f"{qsub}\n{note.partition(': ')[2]}"],
        env={"PATH": "/usr/bin:/bin", "ACCEPTED": str(accepted)},
    )
    chain = [f"-W depend=afternotok:{job}.pbs gpt.pbs" for job in (1, 2, 3)]
    assert (tmp_path / "calls").read_text().splitlines() == ["gpt.pbs", *chain][:calls]


def test_a_queue_that_takes_fewer_jobs_than_a_chain_is_named(tmp_path, monkeypatch, capsys):
    queue = ["--queue", "capacity", "--nodes", "4", "--time", "60"]
    *_, limit, command = write_chain(tmp_path, monkeypatch, capsys, None, *queue)
    assert limit == (
        "capacity takes 2 jobs per user, and the chain needs 4: if training has not finished "
        "after 2, submit them again."
    )
    assert command.startswith("Submit the chain of 2 jobs: ")


@pytest.mark.parametrize(("time", "is_shorter"), [("1:00:00", True), ("2:00:00", False)])
def test_a_script_ends_in_an_interactive_session_or_says_it_must(time, is_shorter, tmp_path):
    text = write(tmp_path, *PBS, "--time", time).read_text()
    assert "-l walltime=1:00:00" in text
    assert ("first make --exit_after below shorter than the session" in text) != is_shorter


def test_a_staging_folder_is_expected_on_the_nodes_alone(tmp_path, capsys):
    staging = ["--stage_checkpoints", "/no/scratch", "--checkpointing_minutes", "10"]
    assert main([*PBS, "--output", str(tmp_path / "job.pbs"), "--", *TRAINER, *staging]) == 0
    said = capsys.readouterr().err
    assert "--stage_checkpoints /no/scratch must exist on the nodes.\n" in said
    assert "/no/scratch is not on this machine" not in said
