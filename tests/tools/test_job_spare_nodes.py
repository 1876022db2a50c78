"""Job scripts with spare nodes, under bash with a made-up srun and mpiexec; and the file of hosts.

tests/cluster runs them in a real Slurm.
"""

import socket
import subprocess
from pathlib import Path

import pytest

from llm.tools.bad_nodes import add_bad_nodes, find_hosts_without_devices, keep_minority
from llm.tools.jobs.jobs import main
from llm.tools.preflight import main as preflight
from tests.support.faults import Fault, install
from tests.support.ranks import run_ranks, values

TRAINER = ["--model_name_or_path", "gpt2", "--train_file", "a.txt", "--output_dir", "runs/a"]
# Both starters read the nodes from the script's file. The pre-flight fails on the nodes in BROKEN.
PROFILE = """
conda() { :; }
module() { :; }
scontrol() { printf 'node%s\\n' 1 2 3 4; }
llm-trainers() { echo runs/a; }
starter() {
    local nodes
    nodes=$(xargs < "$1"); shift
    echo "$nodes: $*" >> calls
    case "$*" in *" preflight "*) ;; *) return 0 ;; esac
    local code=0
    for node in $nodes; do
        case " $BROKEN " in *" $node "*) echo "${node%%.*}" >> "${@: -1}"; code=1 ;; esac
    done
    return $code
}
srun() {
    local file
    for word; do case $word in --nodelist=*) file=${word#*=} ;; esac; done
    while [[ "$1" == --* ]]; do shift; done
    starter "$file" "$@"
}
mpiexec() { shift; starter "$@"; }
"""
SLURM = ["slurm", "--account", "me", "--partition", "gpu", "--nodes", "2"]
PBS = ["pbs", "--account", "me", "--queue", "q", "--nodes", "2"]
STARTS = pytest.mark.parametrize(
    "argv",
    [SLURM, [*SLURM, "--launcher", "task_per_gpu"], PBS, [*PBS, "--launcher", "task_per_gpu"]],
    ids=["torchrun in Slurm", "a task per GPU", "torchrun in PBS", "a process per GPU"],
)


def start(
    folder: Path, *, broken: str, job: str = "7"
) -> tuple[subprocess.CompletedProcess, list[str]]:
    """Run the script in a folder; return the nodes of the training, too."""
    (folder / "calls").unlink(missing_ok=True)
    (folder / "venv/bin").mkdir(parents=True, exist_ok=True)
    (folder / "venv/bin/activate").touch()
    (folder / "profile").write_text(PROFILE)
    (folder / "nodes").write_text("node1\nnode1\nnode2\nnode3\nnode4\n")
    done = subprocess.run(
        ["bash", "job"],
        cwd=folder,
        capture_output=True,
        text=True,
        env={
            "PATH": "/usr/bin:/bin",
            "BASH_ENV": str(folder / "profile"),
            "BROKEN": broken,
            "SLURM_JOB_ID": job,
            "SLURM_JOB_NODELIST": "node[1-4]",
            "SLURM_CPUS_PER_TASK": "8",
            "PBS_JOBID": f"{job}.server",
            "PBS_NODEFILE": str(folder / "nodes"),
        },
    )
    calls = (folder / "calls").read_text().splitlines() if (folder / "calls").exists() else []
    nodes = [call.partition(":")[0] for call in calls if "llm.trainers.gpt" in call]
    return done, nodes


def write(folder: Path, *argv: str) -> str:
    assert main([*argv, "--output", str(folder / "job"), "--", *TRAINER]) == 0
    return (folder / "job").read_text()


@STARTS
def test_a_spare_node_replaces_one_that_fails_the_preflight(argv, tmp_path):
    write(tmp_path, *argv, "--spare_nodes", "2")
    done, nodes = start(tmp_path, broken="node2 node3")
    assert done.returncode == 0, done.stderr
    assert nodes == ["node1 node4"]
    assert (tmp_path / "runs/a/bad_nodes.txt").read_text() == "node2\nnode3\n"
    assert "leaving out node2, which has failed the pre-flight (runs/a/bad_nodes" in done.stdout


@STARTS
def test_a_later_start_leaves_the_nodes_out_from_the_beginning(argv, tmp_path):
    write(tmp_path, *argv, "--spare_nodes", "2")
    start(tmp_path, broken="node1")
    done, nodes = start(tmp_path, broken="node1")
    calls = (tmp_path / "calls").read_text().splitlines()
    assert done.returncode == 0, done.stderr
    assert nodes == ["node2 node3"]
    assert len(calls) == 2  # one pre-flight, one training
    assert "leaving out node1" in done.stdout


@STARTS
def test_a_second_job_in_the_folder_leaves_the_nodes_of_the_first(argv, tmp_path):
    write(tmp_path, *argv, "--spare_nodes", "2")
    start(tmp_path, broken="node1", job="7")
    [first] = (tmp_path / "runs/a").glob("nodes*.txt")
    assert first.read_text() == "node2\nnode3\n"
    (tmp_path / "runs/a/bad_nodes.txt").unlink()
    start(tmp_path, broken="node3", job="8")
    assert first.read_text() == "node2\nnode3\n"
    assert len([*(tmp_path / "runs/a").glob("nodes*.txt")]) == 2


@STARTS
def test_a_job_with_too_few_healthy_nodes_ends_with_its_own_code(argv, tmp_path):
    write(tmp_path, *argv, "--spare_nodes", "2")
    done, nodes = start(tmp_path, broken="node1 node2 node4")
    assert done.returncode == 77
    assert nodes == []
    assert done.stderr.endswith(
        "Healthy nodes: 1 of 4, and the run needs 2. Submit the job again, or remove repaired "
        "nodes from runs/a/bad_nodes.txt.\n"
    )


def test_a_preflight_that_blames_no_node_ends_the_job(tmp_path):
    text = write(tmp_path, *SLURM, "--spare_nodes", "2")
    command = '"${EACH_GPU[@]}" -m llm preflight --bad_nodes "$BAD_NODES"'
    (tmp_path / "job").write_text(text.replace(command, "(exit 9)"))
    done, nodes = start(tmp_path, broken="")
    assert (done.returncode, nodes) == (9, [])


def test_a_restart_on_aurora_has_rank_0_on_the_first_healthy_node(tmp_path):
    argv = ["--site", "aurora", "--nodes", "2", "--time", "1:00:00", "--skip_plan"]
    write(tmp_path, *argv, "--account", "me", "--spare_nodes", "2")
    script = tmp_path / "job"
    script.write_text(script.read_text().replace("LAUNCH=(", 'echo "at $MASTER_ADDR"\nLAUNCH=('))
    done, _ = start(tmp_path, broken="node1")
    assert "at node2.hsn.cm.aurora.alcf.anl.gov\n" in done.stdout


@pytest.mark.parametrize(
    ("argv", "nodes", "queue"),
    [
        (["--site", "polaris", "--nodes", "2"], "select=2:system=polaris", "-q debug\n"),
        (
            ["--site", "polaris", "--nodes", "2", "--spare_nodes", "1"],
            "select=3:system=polaris",
            "-q debug-scaling\n",
        ),
        ([*SLURM, "--spare_nodes", "1"], "--nodes=3\n", "--partition=gpu\n"),
    ],
)
def test_the_job_asks_for_the_spare_nodes_as_well(argv, nodes, queue, tmp_path):
    text = write(tmp_path, *argv, "--time", "1:00:00", "--skip_plan")
    assert nodes in text
    assert queue in text


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["--nodes", "1"], "--spare_nodes needs --nodes of 2 or more; leave it out."),
        (["--container", "a"], "--spare_nodes and --container do not go together"),
        (["--spare_nodes", "-1"], "--spare_nodes"),
    ],
)
def test_spare_nodes_go_with_one_run_on_several_nodes(argv, sentence, capsys):
    assert main([*SLURM, "--spare_nodes", "1", *argv, "--", *TRAINER]) == 2
    assert sentence in capsys.readouterr().err


def run_preflight(path: str, faults: list[Fault] = ()) -> int:
    install(faults)
    return preflight(["--message_mb", "1", "--timeout", "3", "--bad_nodes", path])


@pytest.mark.extended
def test_a_rank_without_a_device_adds_its_host_to_the_file(tmp_path):
    path = tmp_path / "bad_nodes.txt"
    fault = Fault(at="llm.tools.preflight:device_of", what="out of memory", rank=1)
    _, rank_1 = run_ranks(run_preflight, 2, str(path), [fault])
    assert rank_1.value == 1
    assert path.read_text() == f"{socket.gethostname().partition('.')[0]}\n"


@pytest.mark.extended
def test_hosts_that_do_not_answer_are_added_if_they_are_few(tmp_path):
    few, many = tmp_path / "few", tmp_path / "many"
    here = socket.gethostname()
    for path, hosts, size in ((few, f"{here},lost7", "2"), (many, f"{here},lost[7-9]", "4")):
        environment = {"WORLD_SIZE": size, "SLURM_JOB_NODELIST": hosts}
        assert values(run_ranks(run_preflight, 1, str(path), environment=environment)) == [1]
    assert few.read_text() == "lost7\n"
    assert not many.exists() or many.read_text() == ""


def test_a_healthy_job_blames_no_node(tmp_path):
    path = tmp_path / "bad_nodes.txt"
    assert values(run_ranks(run_preflight, 2, str(path))) == [0, 0]
    assert path.read_text() == ""


def test_each_host_is_listed_once_by_its_short_name(tmp_path):
    path = tmp_path / "bad_nodes.txt"
    assert add_bad_nodes(str(path), ["b.cluster.org", "a"]) == ["a", "b"]
    assert add_bad_nodes(str(path), ["b", "c"]) == ["c"]
    assert path.read_text() == "a\nb\nc\n"


def test_a_bad_host_gets_a_line_after_an_edit_without_a_line_break(tmp_path):
    (tmp_path / "bad_nodes.txt").write_text("a\nb")
    assert add_bad_nodes(str(tmp_path / "bad_nodes.txt"), ["c"]) == ["c"]
    assert (tmp_path / "bad_nodes.txt").read_text() == "a\nb\nc\n"


def test_a_fault_of_more_than_half_of_the_hosts_is_not_theirs():
    assert keep_minority(["b"], ["a", "b.x", "b"]) == {"b"}
    assert keep_minority(["b", "c"], ["a", "b", "c"]) == set()
    assert keep_minority([], []) == set()


def test_a_host_without_the_devices_of_the_others_is_found():
    def rank(host: str, device: str, identity: str | None) -> dict:
        return {"host": host, "device": device, "id": identity}

    healthy = {0: rank("a", "cuda:0", "x"), 1: rank("a", "cuda:1", "y")}
    assert find_hosts_without_devices(healthy) == set()
    assert find_hosts_without_devices({**healthy, 2: rank("b", "cpu", None)}) == {"b"}
    shared = {2: rank("c", "cuda:0", "z"), 3: rank("c", "cuda:0", "z")}
    assert find_hosts_without_devices({**healthy, **shared}) == {"c"}
    assert (
        find_hosts_without_devices({0: rank("a", "cpu", None), 1: rank("b", "cpu", None)}) == set()
    )
