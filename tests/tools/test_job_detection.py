"""The draft of a site's file, with made-up clients that print what real ones do."""

import tomllib
from pathlib import Path

import pytest

from llm.tools.jobs import detection, jobs
from llm.tools.jobs.jobs import main
from llm.tools.jobs.sites import find_site
from llm.tools.plan.card_names import device_of_card

TRAINER = ["--model_name_or_path", "gpt2", "--train_file", "a.txt", "--output_dir", "runs/a"]
SINFO = """\
cpu|infinite|1-infinite|400|128|(null)|OFF
gpu_h100|2-00:00:00|1-infinite|36|96|gpu:h100:4(S:0-1),nvme:1|OFF
gpu_a100|2-00:00:00|1-16|30|64|gpu:nvidia_a100-sxm4-40gb:4(S:0-1)|OFF
gpu_a100|2-00:00:00|1-16|6|128|gpu:nvidia_a100-sxm4-40gb:8(S:0-3)|OFF
debug|30:00|1-2|2|96+|gpu:h100:4|OFF
requeue|7-00:00:00|1-infinite|36|96|gpu:h100:4(S:0-1)|REQUEUE
"""
CONFIG = """\
Configuration data as of 2026-08-03T10:41:42
AccountingStorageHost   = localhost
ClusterName             = odyssey
PreemptMode             = REQUEUE
PreemptType             = preempt/partition_prio
"""
PARTITIONS = (
    "PartitionName=gpu_h100 AllowGroups=ALL AllowQos=ALL Default=NO QoS=big MaxNodes=UNLIMITED\n"
    "PartitionName=debug AllowGroups=ALL AllowQos=ALL Default=YES QoS=N/A MaxNodes=2\n"
)
QSTAT_QUEUES = """\
Queue: debug
    queue_type = Execution
    Priority = 150
    total_jobs = 3
    state_count = Transit:0 Queued:1 Held:0 Waiting:0 Running:2 Exiting:0 Begun:0
    resources_max.nodect = 2
    resources_max.walltime = 01:00:00
    resources_min.nodect = 1
    enabled = True
    started = True

Queue: prod
    queue_type = Route
    total_jobs = 0
    route_destinations = small,large
    enabled = True
    started = True

Queue: small
    queue_type = Execution
    from_route_only = True
    resources_max.nodect = 24
    resources_max.walltime = 03:00:00
    resources_min.nodect = 10
    enabled = True
    started = True

Queue: large
    queue_type = Execution
    from_route_only = True
    resources_max.nodect = 496
    resources_max.walltime = 24:00:00
    resources_min.nodect = 25
    enabled = True
    started = True

Queue: preemptable
    queue_type = Execution
    resources_max.walltime = 72:00:00
    enabled = True
    started = True

Queue: R1150389
    queue_type = Execution
    enabled = True
    started = True

Queue: next-eval
    queue_type = Execution
    enabled = False
    started = True

"""
QSTAT_SERVER = """\
Server: sophia-pbs-01.lab.alcf.anl.gov
    server_state = Active
    resources_available.valid_filesystems = home,eagle
"""


def pbs_node(name: str, gpus: int) -> str:
    return f"""\
{name}
     Mom = {name}.hsn.cm.lab.gov
     ntype = PBS
     state = free
     pcpus = 64
     resources_available.arch = linux
     resources_available.host = {name}
     resources_available.ncpus = 64
     resources_available.ngpus = {gpus}
     resources_available.system = sophia
     resources_assigned.ncpus = 0

"""


PBSNODES = pbs_node("x1", 8) + pbs_node("x2", 8) + pbs_node("login", 0)


@pytest.fixture
def programs(tmp_path, monkeypatch):
    """A folder of made-up programs, the only one on PATH."""
    folder = tmp_path / "programs"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setattr(jobs, "plan_run", lambda *_: ([], None))
    return folder


def make(folder: Path, name: str, **output_by_argument: str) -> None:
    """Make a program that prints what belongs to the first known word among its arguments."""
    cases = "".join(
        f"*{argument}*) cat <<'EOF'\n{output}EOF\n;;\n"
        for argument, output in output_by_argument.items()
    )
    path = folder / name
    path.write_text(f'#!/bin/sh\nPATH=/usr/bin:/bin\ncase "$*" in\n{cases}*) exit 1 ;;\nesac\n')
    path.chmod(0o755)


def make_slurm(folder: Path) -> None:
    make(folder, "sinfo", noconvert=SINFO)
    make(folder, "scontrol", config=CONFIG, partition=PARTITIONS)


def draft(tmp_path: Path, capsys) -> tuple[dict, str, Path]:
    """Detect the site; return its table, what the program says, and the file."""
    path = tmp_path / "mine.toml"
    assert main(["--detect", "--output", str(path)]) == 0
    [table] = tomllib.loads(path.read_text()).values()
    return table, capsys.readouterr().err, path


def test_a_slurm_cluster_is_drafted_from_its_clients(programs, tmp_path, capsys):
    make_slurm(programs)
    table, said, path = draft(tmp_path, capsys)
    assert "\n[odyssey]\n" in path.read_text()
    assert table["schedulers"] == ["slurm"]
    assert (table["device"], table["gpus_per_node"], table["cpus_per_gpu"]) == ("h100-80gb", 4, 24)
    assert table["queues"] == [
        {"name": "gpu_h100", "max_nodes": 36, "hours": 48},
        {
            "name": "gpu_a100",
            "max_nodes": 16,
            "hours": 48,
            "device": "a100-40gb",
            "cpus_per_gpu": 16,
        },
        {"name": "debug", "max_nodes": 2, "hours": 0.5},
        {"name": "requeue", "max_nodes": 36, "hours": 168, "preemptable": True},
    ]
    assert "Not found: limits of the QOS big: see sacctmgr show qos.\n" in said
    assert "Not found: the module or container with PyTorch (set_up).\n" in said
    assert f"Complete the draft, and use it: llm-trainers jobs --site {path}\n" in said
    assert "# - the module or container with PyTorch (set_up)\n" in path.read_text()


def test_the_draft_is_a_site_as_it_is(programs, tmp_path, capsys):
    make_slurm(programs)
    _, _, path = draft(tmp_path, capsys)
    assert find_site(str(path)).ran == "nobody yet"
    assert main(["--site", str(path), "--nodes", "20", "--", *TRAINER]) == 0
    printed = capsys.readouterr()
    assert "#SBATCH --partition=gpu_h100\n" in printed.out
    assert "The job goes to the partition gpu_h100 (1-36 nodes, 48 h).\n" in printed.err


def test_a_slurm_that_preempts_by_qos_leaves_the_question_open(programs, tmp_path, capsys):
    make_slurm(programs)
    make(programs, "scontrol", config=CONFIG.replace("partition_prio", "qos"), partition="")
    table, said, _ = draft(tmp_path, capsys)
    assert not any(queue.get("preemptable") for queue in table["queues"])
    assert "Not found: the QOS where a job can be ended at any time" in said


def test_a_pbs_cluster_is_drafted_from_its_clients(programs, tmp_path, capsys):
    make(programs, "qstat", Qf=QSTAT_QUEUES, Bf=QSTAT_SERVER)
    make(programs, "pbsnodes", a=PBSNODES)
    table, said, path = draft(tmp_path, capsys)
    assert "\n[sophia]\n" in path.read_text()
    assert (table["schedulers"], table["system"]) == (["pbs"], "sophia")
    assert (table["gpus_per_node"], table["cpus_per_gpu"]) == (8, 8)
    assert table["queues"] == [
        {"name": "debug", "max_nodes": 2, "hours": 1},
        {"name": "prod", "min_nodes": 10, "max_nodes": 24, "hours": 3},
        {"name": "prod", "min_nodes": 25, "max_nodes": 496, "hours": 24},
        {"name": "preemptable", "hours": 72, "preemptable": True},
    ]
    assert "Not found: filesystems, which a job must name: some of home,eagle.\n" in said
    assert "Not found: the device.\n" in said
    assert main(["--site", str(path), "--nodes", "12", "--time", "2:00:00", "--", *TRAINER]) == 0
    assert "#PBS -q prod\n#PBS -l select=12:system=sophia\n" in capsys.readouterr().out


def test_the_cards_of_this_node_name_the_device(programs, tmp_path, capsys):
    make(programs, "qstat", Qf=QSTAT_QUEUES, Bf=QSTAT_SERVER)
    make(programs, "pbsnodes", a=PBSNODES)
    make(programs, "nvidia-smi", query="NVIDIA A100-SXM4-40GB\n" * 8)
    table, said, _ = draft(tmp_path, capsys)
    assert table["device"] == "a100-40gb"
    assert "the device" not in said


def test_a_node_without_scheduled_gpus_counts_its_cards_and_cores(programs, tmp_path, capsys):
    make(programs, "sinfo", noheader="batch|infinite|1-infinite|9|128|(null)|OFF\n")
    make(
        programs,
        "rocm-smi",
        show="".join(f"GPU[{n}]\t: Card series: \t\tAMD Instinct MI250X\n" for n in range(8)),
    )
    make(programs, "lscpu", **{"": "Architecture:  x86_64\nCPU(s):  128\nSocket(s):  1\n"})
    table, said, _ = draft(tmp_path, capsys)
    assert (table["device"], table["gpus_per_node"], table["cpus_per_gpu"]) == ("mi250x", 8, 16)
    assert table["queues"] == [{"name": "batch", "max_nodes": 9}]
    assert "gpus_per_node" not in said


def test_the_cards_of_a_login_node_of_another_kind_do_not_count(programs, tmp_path, capsys):
    make_slurm(programs)
    make(programs, "nvidia-smi", query="Quadro RTX 6000\n")
    table, _, _ = draft(tmp_path, capsys)
    assert (table["device"], table["gpus_per_node"]) == ("h100-80gb", 4)


def test_a_client_that_hangs_or_fails_is_named(programs, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(detection, "_TIMEOUT_SECONDS", 1)
    (programs / "sinfo").write_text("#!/bin/sh\nexec /bin/sleep 60\n")
    (programs / "scontrol").write_text(
        "#!/bin/sh\nprintf '\\033[31mUnable to contact slurm controller\\033[0m' >&2\nexit 1\n"
    )
    for name in ("sinfo", "scontrol"):
        (programs / name).chmod(0o755)
    table, said, _ = draft(tmp_path, capsys)
    assert "queues" not in table
    assert "%M tells: it does not answer in 1 s.\n" in said
    assert "Not found: what scontrol show config tells: [31mUnable to contact slurm contr" in said
    assert "Not found: the queues.\n" in said


def test_a_machine_without_a_scheduler_is_refused(programs, capsys):
    assert main(["--detect"]) == 2
    assert capsys.readouterr().err == (
        "error: --detect finds neither sinfo nor qstat here: call it on a login node of the "
        "cluster.\n"
    )


def test_a_draft_never_replaces_a_file(programs, tmp_path, capsys):
    make_slurm(programs)
    _, _, path = draft(tmp_path, capsys)
    assert not path.stat().st_mode & 0o111
    path.write_text("edited")
    assert main(["--detect", "--output", str(path)]) == 2
    assert "already exists" in capsys.readouterr().err
    assert path.read_text() == "edited"


@pytest.mark.parametrize(
    ("card", "device"),
    [
        ("NVIDIA H100 80GB HBM3", "h100-80gb"),
        ("NVIDIA H100 64GB HBM2", "h100-64gb"),
        ("NVIDIA GH200 480GB", "gh200-96gb"),
        ("NVIDIA A100-SXM-64GB", "a100-64gb"),
        ("a100", None),  # of 40 or 80 GB
        ("h200", "h200-141gb"),
        ("NVIDIA RTX A1000", None),
        ("AMD Instinct MI300X", None),
    ],
)
def test_a_cards_name_leads_to_the_device_of_the_plan(card, device):
    assert device_of_card(card) == device


def test_a_line_of_sinfo_without_a_number_of_nodes_is_left_out():
    lines = "gpu|infinite|1|x|64|gpu:4|OFF\nbig|infinite|1|2|N/A|gpu:4|OFF\n"
    [queue] = detection.read_sinfo(lines, has_preemption=True)
    assert (queue.name, queue.node.gpus, queue.node.cpus) == ("big", 4, None)
