"""Scripts for PBS: the torchruns of a job, and chains of jobs."""

import subprocess
from pathlib import Path

import pytest

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


def start_torchruns(folder: Path, script: Path, launcher: str) -> list[str]:
    """Run a script on made-up nodes; return the arguments of each torchrun."""
    (folder / "venv/bin").mkdir(parents=True)
    (folder / "venv/bin/activate").write_text(f"PATH={folder}/venv/bin:$PATH\n")
    for name, line in {"torchrun": 'echo "$*" >> torchruns', "python": ":"}.items():
        program = folder / "venv/bin" / name
        program.write_text(f"#!/bin/sh\n{line}\n")
        program.chmod(0o755)
    (folder / "profile").write_text(PROFILE)
    (folder / "nodes").write_text("node1\nnode2\nnode3\n")
    variables = {
        "PATH": "/usr/bin:/bin",
        "BASH_ENV": str(folder / "profile"),
        "LAUNCHER": launcher,
        "PBS_JOBID": "7.server",
        "PBS_NODEFILE": str(folder / "nodes"),
    }
    done = subprocess.run(
        ["bash", script], cwd=folder, env=variables, capture_output=True, text=True
    )
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
