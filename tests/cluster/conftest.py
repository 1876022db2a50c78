"""A cluster for the tests of this folder: Slurm on this machine, or the parts of PBS."""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.jobs import HERE, Slurm, Submission, missing

SLURM = ("slurmctld", "slurmd", "munged", "sbatch", "unshare")
MPICH = ("mpiexec.hydra", "unshare")


def _skip_without(programs: tuple[str, ...], packages: str) -> None:
    lacking = missing(*programs)
    if lacking or os.geteuid() != 0:
        what = f"no {', '.join(lacking)}" if lacking else "not root"
        pytest.skip(
            f"{what}; as root: apt-get install -y --no-install-recommends {packages}",
            allow_module_level=True,
        )


@pytest.fixture(scope="session")
def slurm() -> Iterator[Slurm]:
    """Three virtual nodes of a real Slurm."""
    _skip_without(SLURM, "slurmctld slurmd slurm-client munge")
    state = Path(tempfile.mkdtemp(prefix="slurm-"))  # pytest's own folders are too long for sockets
    script = HERE / "local_slurm.sh"
    # Daemons keep what they inherit, so nothing may wait for the end of a pipe.
    with (state / "start.log").open("w") as log:
        done = subprocess.run([script, "start", state, "3"], stdout=log, stderr=log, timeout=120)
    assert done.returncode == 0, (state / "start.log").read_text()
    yield Slurm({"SLURM_CONF": str(state / "slurm.conf"), "OMP_NUM_THREADS": "1"})
    subprocess.run([script, "stop", state], check=True, timeout=120)
    shutil.rmtree(state, ignore_errors=True)


@pytest.fixture(scope="session")
def pbs_hosts() -> Iterator[list[str]]:
    """Names of three hosts that are this machine."""
    _skip_without(MPICH, "mpich")
    names = ["pbs1", "pbs2", "pbs3"]
    hosts, mark = Path("/etc/hosts"), "# llm tests"
    # In place: in a container, /etc/hosts cannot be renamed over. A killed run leaves its lines.
    kept = [line for line in hosts.read_text().splitlines() if not line.endswith(mark)]
    hosts.write_text("\n".join([*kept, *(f"127.0.0.1 {name} {mark}" for name in names)]) + "\n")
    yield names
    kept = [line for line in hosts.read_text().splitlines() if not line.endswith(mark)]
    hosts.write_text("\n".join(kept) + "\n")


@pytest.fixture(scope="session")
def submission(tmp_path_factory) -> Submission:
    return Submission(tmp_path_factory.mktemp("cluster"))
