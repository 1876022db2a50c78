import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from llm.checkpoint.run_folder import RunFolder
from llm.tools.jobs import jobs
from llm.tools.jobs.jobs import main, read_minutes
from llm.tools.jobs.sites import known_sites
from llm.trainers.gpt.main import parse_args

EXAMPLES = Path(__file__).parent.parent.parent / "examples"
SCRIPTS = sorted(
    path
    for path in [*EXAMPLES.glob("*/*.sh"), *EXAMPLES.glob("*/*.pbs")]
    if not path.stem.startswith("prepare_")
)
MY_DATA = 'model_name_or_path = "gpt2"\ntrain_file = "a.txt"\n'
TRAINER = ["--model_name_or_path", "gpt2", "--train_file", "a b.txt", "--output_dir", "runs/a"]


@pytest.fixture(autouse=True)
def plan(monkeypatch):
    """Planning takes seconds; the tests of the plan call the real function."""
    monkeypatch.setattr(jobs, "plan_run", lambda *_: (["Plan: it fits."], None))


def name_of(path: Path) -> str:
    return str(path.relative_to(EXAMPLES))


def default_trainer(argv: tuple[str, ...]) -> list[str]:
    """The members of a sweep have folders without an --output_dir of the trainer."""
    return TRAINER[:-2] if argv[0] == "sweep" else TRAINER


def write(capsys, *argv: str, trainer: list[str] | None = None) -> str:
    code = main([*argv, "--", *(default_trainer(argv) if trainer is None else trainer)])
    printed = capsys.readouterr()
    assert code == 0, printed.err
    return printed.out


def refuse(capsys, *argv: str, trainer: list[str] | None = None) -> str:
    assert main([*argv, "--", *(default_trainer(argv) if trainer is None else trainer)]) == 2
    return capsys.readouterr().err


def options_of(script: str) -> list[str]:
    """The trainer's options of a script."""
    block = script.split("OPTIONS=(\n")[1].split("\n)\n")[0]
    return shlex.split(re.sub(r'"\$\{\w+:-(\w+)\}"', r"\1", block))  # what may come from outside


def directives(script: str) -> dict[str, str]:
    """Options of sbatch by name."""
    return dict(re.findall(r"(?m)^#SBATCH --([\w-]+)=(\S*)$", script))


@pytest.mark.parametrize("path", SCRIPTS, ids=name_of)
def test_an_example_is_what_the_command_in_its_head_writes(path, capsys, monkeypatch):
    monkeypatch.chdir(EXAMPLES.parent)  # where --config examples/... is
    text = path.read_text(encoding="utf-8")
    command = re.search(r"(?m)^# Made by: llm-trainers jobs (.*) -- OPTIONS$", text)[1]
    assert write(capsys, *shlex.split(command), trainer=options_of(text)) == text


def test_a_warning_about_options_is_printed_once_for_all_members(capsys, caplog):
    members = ["--output_dir", "s", "--grid", "seed=1,2,3", "--", *TRAINER[:-2]]
    members += ["--learning_rate", "1e-3", "--learning_rate", "2e-3"]
    write(capsys, "sweep", "slurm", trainer=members)
    sentence = "--learning_rate is given twice: 0.002 counts, and 0.001 does not."
    assert caplog.messages.count(sentence) == 1


@pytest.mark.parametrize("path", SCRIPTS, ids=name_of)
def test_the_trainer_accepts_an_examples_options_which_resume(path, monkeypatch):
    monkeypatch.chdir(EXAMPLES.parent)
    config = parse_args(options_of(path.read_text(encoding="utf-8")))
    assert config.resume_from_checkpoint
    if path.stem != "array":  # where each member has another folder
        assert config.output_dir.startswith("runs/")


def test_gpt2_small_has_a_script_for_each_mode_on_four_nodes_of_four_gpus(monkeypatch):
    monkeypatch.chdir(EXAMPLES.parent)
    modes = {}
    for name in ("gpt2_small", "gpt2_small_decentralized"):
        script = (EXAMPLES / f"slurm/{name}.sh").read_text(encoding="utf-8")
        found = directives(script)
        assert (found["nodes"], found["gpus-per-node"]) == ("4", "4")
        config = parse_args(options_of(script))
        modes[name] = (config.data_parallel, config.topology)
    assert modes["gpt2_small"][0] == "allreduce"
    assert modes["gpt2_small_decentralized"] == ("gossip", "alternating-exp-ring")


# What a site's profile and its scheduler provide. A training by torchrun is preempted at once.
PROFILE = """
module() { :; }
conda() { :; }
scontrol() { if [[ "$1" == show ]]; then echo node1; else echo "scontrol $*"; fi; }
srun() {
    while [[ "$1" == --* ]]; do shift; done
    case "$*" in torchrun* | *"jobs output_dir"*) "$@" ;; esac
}
torchrun() {
    if [[ "$*" == *" -m llm.trainers.gpt "* ]]; then
        mkdir -p runs/mine
        printf '{\\n "status": "preempted",\\n}\\n' > runs/mine/status.json
    fi
}
mpiexec() { :; }
"""
RECORD = {
    "SLURM_JOB_ACCOUNT": "me",
    "SLURM_JOB_PARTITION": "gpu",
    "SLURM_JOB_ID": "7",
    "SLURM_JOB_NODELIST": "node1",
    "SLURM_CPUS_PER_TASK": "4",
    "SLURM_NTASKS": "4",
}
"""What a job that `sbatch --account me --partition gpu` has submitted knows of itself."""


def start(folder: Path, path: Path, *words: str, **variables: str) -> subprocess.CompletedProcess:
    """Run a script as it is shipped, in a folder."""
    (folder / "profile").write_text(PROFILE)
    return subprocess.run(
        ["bash", str(path), *words],
        capture_output=True,
        text=True,
        cwd=folder,
        env={"PATH": "/usr/bin:/bin", "BASH_ENV": str(folder / "profile"), **variables},
    )


@pytest.mark.parametrize("path", [p for p in SCRIPTS if p.suffix == ".sh"], ids=name_of)
def test_a_slurm_example_asks_to_be_filled_in(path, tmp_path):
    done = start(tmp_path, path)
    assert done.returncode == 2
    assert re.fullmatch(r"Fill in .*__ALLOCATION__.* at the top of this script, .*\n", done.stderr)


@pytest.mark.parametrize("path", SCRIPTS, ids=name_of)
def test_what_the_scheduler_was_given_needs_no_filling_in(path, tmp_path):
    done = start(tmp_path, path, **RECORD)
    if "IMAGE=" in path.read_text():
        assert done.stderr.startswith("Fill in __IMAGE__ at the top of this script")
    else:
        assert done.stderr.startswith("VENV=venv has no bin/python; name the environment")
    assert done.returncode == 2


def make_environment(folder: Path) -> None:
    """Make a virtual environment that has the package and the Python of the tests."""
    (folder / "bin").mkdir(parents=True)
    paths = f'export PATH={Path(sys.executable).parent}:"$PATH" PYTHONPATH={EXAMPLES.parent}\n'
    (folder / "bin/activate").write_text(paths)


def test_a_script_uses_the_python_of_a_conda_environment(tmp_path):
    """Such an environment has no bin/activate."""
    (tmp_path / "env/bin").mkdir(parents=True)
    for name in ("python", "llm-trainers"):
        program = tmp_path / "env/bin" / name
        program.write_text('#!/bin/bash\necho "$*" > asked; echo runs/mine\n')
        program.chmod(0o755)

    start(tmp_path, EXAMPLES / "slurm/requeue.sh", VENV="env", **RECORD)

    assert (tmp_path / "asked").read_text().startswith("jobs output_dir --model_name")


# Scripts of conda, which read a variable that may be unset, run a command that may fail, or take an
# argument for the name of an environment.
PACKED = """
if [ -n "$CONDA_PREFIX" ]; then type deactivate > /dev/null 2>&1; fi
PS1="(env) $PS1"
"""
BASE = 'if [ $# -gt 0 ]; then echo "There is no environment $1" >&2; exit 1; fi\n'


@pytest.mark.parametrize(
    ("activate", "variables"),
    [(PACKED, {}), (PACKED, {"CONDA_PREFIX": "/opt/conda"}), (BASE, {})],
    ids=["an unset variable", "a command that fails", "arguments"],
)
@pytest.mark.parametrize(
    "path",
    ["slurm", "pbs", "prepare slurm", "prepare pbs", *EXAMPLES.glob("*/prepare_data.*")],
    ids=lambda path: path if isinstance(path, str) else name_of(path),
)
def test_an_environment_that_expects_a_plain_shell_is_activated(
    path, activate, variables, tmp_path, capsys
):
    (tmp_path / "env/bin").mkdir(parents=True)
    (tmp_path / "env/bin/activate").write_text(f"{activate}PATH={tmp_path}/env/bin:$PATH\n")
    for name in ("python", "llm-trainers"):
        (tmp_path / "env/bin" / name).write_text("#!/bin/sh\n")
        (tmp_path / "env/bin" / name).chmod(0o755)
    (tmp_path / "nodes").write_text("node1\n")
    (tmp_path / "my.toml").touch()
    if isinstance(path, Path):
        script, words = path, ["--input", "a.txt"]
    else:
        prepares = path.startswith("prepare")
        options = PREPARE if prepares else TRAINER
        words = options if prepares else ["my.toml"]
        script = tmp_path / "script"
        script.write_text(write(capsys, *path.split(), trainer=options))

    done = start(
        tmp_path,
        script,
        *words,
        VENV=str(tmp_path / "env"),
        PBS_NODEFILE=str(tmp_path / "nodes"),
        PBS_JOBID="7.pbs",
        SLURM_JOB_NUM_NODES="1",
        SLURM_CPUS_ON_NODE="4",
        **RECORD,
        **variables,
    )

    assert done.returncode == 0, done.stderr
    if isinstance(path, str):
        assert "Running: " in done.stdout


def test_only_the_directives_of_a_job_are_places_to_fill_in(tmp_path, capsys):
    make_environment(tmp_path / "venv")
    prompt = "#SBATCH --account=__ALLOCATION__\n#SBATCH __PROMPT__"
    trainer = [*TRAINER, "--sample_prompt", f"a\n{prompt}", "--sample_steps", "9"]
    script = tmp_path / "script"
    filled_in = ("--account", "me", "--partition", "gpu", "--name", "__TEST__")
    script.write_text(write(capsys, "slurm", *filled_in, trainer=trainer))

    done = start(tmp_path, script, **{**RECORD, "SLURM_JOB_ACCOUNT": "", "SLURM_JOB_PARTITION": ""})

    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, marks=pytest.mark.extended if path.parent.name != "slurm" else ())
        for path in SCRIPTS
        if path.stem != "array"
    ],
    ids=name_of,
)
def test_a_configuration_as_argument_replaces_the_options_of_an_example(
    path, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    make_environment(tmp_path / "env")
    (tmp_path / "my.toml").write_text(f'{MY_DATA}seed = 1\noutput_dir = "runs/mine"\n')
    script = tmp_path / "script"
    script.write_text(path.read_text().replace("IMAGE=__IMAGE__", "IMAGE=lab/llm:1"))

    done = start(tmp_path, script, "my.toml", "--seed", "2", VENV=str(tmp_path / "env"), **RECORD)

    assert done.returncode == 0, done.stderr
    told = re.search(r"Running: (.*) -m llm\.trainers\.gpt (.*)", done.stdout)
    config = parse_args(shlex.split(told[2]))
    values = (config.seed, config.output_dir, config.resume_from_checkpoint)
    assert values == (2, "runs/mine", True)
    ends = {"pretrain": 165, "tensor_pipeline": 165, "chain": 165, "polaris_single": 45}
    end = ends.get(path.stem, 342) if path.suffix == ".pbs" else None
    assert config.exit_after == end
    if path.suffix == ".pbs":  # outside a job, on this host only
        assert told[1].startswith("torchrun --standalone --nproc_per_node=")


@pytest.mark.parametrize(
    ("line", "words", "image"),
    [
        ('output_dir = "runs/mine"  # the "best" one', [], []),
        pytest.param("output-dir = 'runs/mine'", [], [], marks=pytest.mark.extended),
        pytest.param(
            'output_dir = "runs/other"',
            ["--output_dir", "runs/mine"],
            [],
            marks=pytest.mark.extended,
        ),
        ("", ["--output-dir=runs/mine"], ["--container", "lab/llm:1"]),
    ],
    ids=["quotes in a comment", "dash and single quotes", "command line wins", "container"],
)
def test_a_job_requeues_by_the_status_of_the_run_that_the_trainer_writes(
    line, words, image, tmp_path, capsys
):
    make_environment(tmp_path / "venv")
    (tmp_path / "my.toml").write_text(MY_DATA + line)
    script = tmp_path / "script"
    script.write_text(write(capsys, "slurm", "--requeue", *image))

    # In a container, Python is that of the image.
    image_path = f"{Path(sys.executable).parent}:/usr/bin:/bin" if image else "/usr/bin:/bin"
    variables = {**RECORD, "PATH": image_path, "PYTHONPATH": str(EXAMPLES.parent)}
    done = start(tmp_path, script, "my.toml", *words, **variables)

    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("\nscontrol requeue 7\n")


def test_a_job_without_an_output_dir_ends_before_it_trains(tmp_path):
    make_environment(tmp_path / "venv")
    (tmp_path / "my.toml").write_text(MY_DATA)

    done = start(tmp_path, EXAMPLES / "slurm/requeue.sh", "my.toml", **RECORD)

    assert done.returncode == 2
    assert done.stderr == (
        "error: The job script needs an output_dir; add it to the trainer's options.\n"
    )
    assert "Running" not in done.stdout


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="apt-get install shellcheck")
@pytest.mark.parametrize(
    "argv",
    [
        ["slurm", "--nodes", "4", "--requeue"],
        ["slurm", "--requeue", "--container", "a b.sqsh"],
        ["slurm", "--nodes", "2", "--launcher", "task_per_gpu", "--requeue"],
        ["sweep", "slurm", "--nodes", "2", "--", "--output_dir", "s", "--grid", "seed=1,2"],
        ["sweep", "pbs", "--nodes", "2", "--", "--output_dir", "s", "--grid", "seed=1,2"],
        ["pbs", "--nodes", "4"],
        ["pbs", "--launcher", "task_per_gpu", "--chain"],
        *[
            ["--site", site, "--nodes", "2", "--time", "1:00:00"]
            for site in known_sites()
            if site != "generic"
        ],
    ],
    ids=" ".join,
)
def test_shellcheck_finds_nothing(argv, capsys):
    script = write(capsys, *argv)
    done = subprocess.run(["shellcheck", "-"], input=script, capture_output=True, text=True)
    assert done.stdout == ""


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="apt-get install shellcheck")
def test_shellcheck_finds_nothing_in_what_is_shipped():
    done = subprocess.run(["shellcheck", *SCRIPTS], capture_output=True, text=True)
    assert done.stdout == ""


def test_requested_resources_appear_in_the_directives(capsys):
    script = write(
        capsys, "slurm", "--nodes", "4", "--gpus_per_node", "8", "--time", "1-12:00:00",
        "--account", "m1234", "--queue", "gpu", "--name", "wiki", "--venv", "/home/me/venv",
    )  # fmt: skip
    assert directives(script) == {
        "job-name": "wiki",
        "account": "m1234",
        "partition": "gpu",
        "nodes": "4",
        "ntasks-per-node": "1",
        "cpus-per-task": "64",
        "gpus-per-node": "8",
        "time": "36:00:00",
        "mem": "0",
        "output": "%x-%j.log",
    }
    assert "\nVENV=/home/me/venv\n" in script
    assert "    --train_file 'a b.txt'\n" in script
    assert "=__" not in script


SWEEP = ["--output_dir", "s", "--grid", "learning-rate=1e-4,3e-4", "betas=0.9 0.95,0.8 0.9"]


@pytest.mark.parametrize("scheduler", ["slurm", "pbs"])
def test_an_array_has_a_job_for_each_member_of_a_sweep(scheduler, tmp_path, capsys):
    make_environment(tmp_path / "venv")
    script, nodes = tmp_path / "script", tmp_path / "nodes"
    script.write_text(write(capsys, "sweep", scheduler, "--", *SWEEP))
    nodes.write_text("node1\n")
    directive = {"slurm": "#SBATCH --array=0-3\n", "pbs": "#PBS -J 0-3\n"}[scheduler]
    assert directive in script.read_text()

    runs = []
    for index in map(str, range(4)):
        job = {"PBS_JOBID": f"7[{index}].host", "PBS_ARRAY_INDEX": index}
        job["PBS_NODEFILE"] = str(nodes)
        if scheduler == "slurm":
            job = {**RECORD, "SLURM_ARRAY_TASK_ID": index}
        done = start(tmp_path, script, **job)
        assert done.returncode == 0, done.stderr
        command = re.search(r"Running: .* -m llm\.trainers\.gpt (.*)", done.stdout)[1]
        config = parse_args(shlex.split(command.replace("a b.txt", "a.txt")))
        assert config.resume_from_checkpoint
        runs.append((config.learning_rate, config.betas, config.output_dir[:30]))

    assert runs == [
        (1e-4, (0.9, 0.95), "s/learning_rate=1e-4,betas=0.9"),
        (1e-4, (0.8, 0.9), "s/learning_rate=1e-4,betas=0.8"),
        (3e-4, (0.9, 0.95), "s/learning_rate=3e-4,betas=0.9"),
        (3e-4, (0.8, 0.9), "s/learning_rate=3e-4,betas=0.8"),
    ]


def test_the_script_of_an_array_takes_no_options(tmp_path):
    done = start(tmp_path, EXAMPLES / "slurm/array.sh", "my.toml", **RECORD)
    assert done.returncode == 2
    assert done.stderr.startswith("The script of an array takes no options; write another one")


def test_a_line_break_in_the_folder_of_a_sweep_stays_in_the_comment(tmp_path, capsys):
    folder = str(tmp_path / "s\ntouch owned")
    argv = ["sweep", "slurm", "--", "--output_dir", folder, "--grid", "seed=1,2"]
    assert main([*argv, "--", *TRAINER[:-2]]) == 0
    head = capsys.readouterr().out.partition("#SBATCH ")[0]
    assert "s\\x0atouch owned' --grid" in head
    assert all(line.startswith("#") for line in head.splitlines())


def test_an_array_leaves_out_members_that_have_finished(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    argv = ["sweep", "slurm", "--", "--output_dir", "s", "--grid", "seed=1,2"]
    trainer = ["--", *TRAINER[:-2]]
    for name in ("seed=1", "seed=2"):
        (tmp_path / "s" / name).mkdir(parents=True)
    (tmp_path / "s/seed=1/status.json").write_text('{"status": "finished"}')
    assert main([*argv, *trainer]) == 0
    printed = capsys.readouterr()
    assert "    0) OPTIONS+=(--seed=2 --output_dir=s/seed=2) ;;\n    *)" in printed.out
    assert printed.err.startswith("Left out: 1 member that has finished.\n")
    assert "llm-trainers sweep --output_dir s --grid seed=1,2 --status -- " in printed.err
    (tmp_path / "s/seed=2/status.json").write_text('{"status": "finished"}')
    assert main([*argv, *trainer]) == 2
    assert capsys.readouterr().err == "error: All members of s have finished.\n"


def test_an_array_leaves_out_members_that_run_now(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    argv = ["sweep", "slurm", "--", "--output_dir", "s", "--grid", "seed=1,2", "--", *TRAINER[:-2]]
    with RunFolder(Path("s/seed=1")).lock():
        assert main(argv) == 0
        printed = capsys.readouterr()
        with RunFolder(Path("s/seed=2")).lock():
            assert main(argv) == 2
    assert "    0) OPTIONS+=(--seed=2 --output_dir=s/seed=2) ;;\n    *)" in printed.out
    assert printed.err.startswith("Left out: 1 member that runs now.\n")
    assert "All members of s have finished, run now, or branch" in capsys.readouterr().err


def test_frontiers_nodes_are_whole_for_torchrun(capsys):
    found = directives(
        write(capsys, "--site", "frontier", "--time", "2:00:00", "--launcher", "torchrun")
    )
    assert (found["gpus-per-node"], found["cpus-per-task"]) == ("8", "56")
    assert "gpus-per-task" not in found


def test_one_task_for_each_gpu_has_that_many_tasks(capsys):
    script = write(capsys, "slurm", "--nodes", "2", "--launcher", "task_per_gpu")
    found = directives(script)
    assert (found["ntasks-per-node"], found["cpus-per-task"]) == ("4", "8")
    assert "torchrun" not in script
    assert "--kill-on-bad-exit=1" in script


def test_a_polaris_script_has_the_required_directives(capsys):
    script = write(
        capsys, "pbs", "--site", "polaris", "--nodes", "16", "--time", "3:00:00", "--account", "A"
    )
    for line in (
        "-A A",
        "-q prod",
        "-l select=16:system=polaris",
        "-l walltime=03:00:00",
        "-l filesystems=home:eagle",
        "-l place=scatter",
    ):
        assert f"\n#PBS {line}\n" in script
    assert "module use /soft/modulefiles\nmodule load conda\nconda activate base\n" in script
    assert "--ppn 1\n        --cpu-bind none\n        bash -c" in script


@pytest.mark.parametrize(
    ("plugin", "choice", "network"),
    [(True, "", "AWS Libfabric"), (True, "off", ""), (False, "", "")],
    ids=["a node with the plugin", "the plugin turned off", "a node without it"],
)
def test_a_polaris_job_takes_the_fast_network_and_near_gpus(
    plugin, choice, network, tmp_path, capsys
):
    """The lines of the site run in bash, with the plugin's folder moved into the test's."""
    script = write(capsys, "--site", "polaris", "--nodes", "10", "--time", "3:00:00")
    assert '--max_restarts=0 "${NUMA[@]}"\n' in script
    assert "NUMA=(--numa-binding=node)" in script
    folder = tmp_path / "aws-ofi-nccl" / "v1.9.1-aws" / "lib"
    if plugin:
        folder.mkdir(parents=True)
    begin, end = script.index("# Local rank n"), script.index('if [[ -r "$VENV/bin/activate')
    lines = script[begin:end].replace("/soft/libraries", str(tmp_path))
    shown = 'echo "$CUDA_VISIBLE_DEVICES|${NCCL_NET:-}|${FI_MR_CACHE_MONITOR:-}|$LD_LIBRARY_PATH"'
    environment = {"PATH": os.environ["PATH"], "LD_LIBRARY_PATH": "/old", "NCCL_PLUGIN": choice}
    done = subprocess.run(
        ["bash", "-euc", lines + shown], env=environment, capture_output=True, text=True, check=True
    )
    monitor = "userfaultfd" if network else ""
    paths = f"{tmp_path}/hwloc/lib:{folder}:/old" if network else "/old"
    assert done.stdout == f"3,2,1,0|{network}|{monitor}|{paths}\n"


def test_without_the_plugin_a_polaris_job_drops_what_the_module_sets(capsys):
    names = ("NCCL_NET", "NCCL_NET_GDR_LEVEL", "NCCL_CROSS_NIC", "NCCL_COLLNET_ENABLE")
    script = write(capsys, "--site", "polaris", "--nodes", "10", "--time", "3:00:00")
    begin, end = script.index("# Local rank n"), script.index('if [[ -r "$VENV/bin/activate')
    environment = {"PATH": os.environ["PATH"], "NCCL_PLUGIN": "off", **dict.fromkeys(names, "1")}
    done = subprocess.run(
        ["bash", "-euc", script[begin:end] + "env"],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert set(re.findall(r"(?m)^NCCL_\w+", done.stdout)) == {"NCCL_PLUGIN"}


@pytest.mark.parametrize(
    ("nodes", "time", "queue"),
    [("2", "1:00:00", "debug"), ("2", "6:00:00", "capacity"), ("64", "1:00:00", "debug-scaling"),
     ("256", "12:00:00", "prod"), ("1999", "18:00:00", "prod"), ("16", "168:00:00", "capacity")],
)  # fmt: skip
def test_the_aurora_queue_depends_on_the_size_of_the_job(nodes, time, queue, capsys):
    script = write(capsys, "--site", "aurora", "--nodes", nodes, "--time", time)
    assert f"\n#PBS -q {queue}\n" in script


@pytest.mark.parametrize(
    ("nodes", "time", "queue"),
    [("1", "1:00:00", "debug"), ("4", "0:30:00", "debug-scaling"), ("10", "3:00:00", "prod"),
     ("24", "3:00:00", "prod"), ("99", "6:00:00", "prod"), ("100", "24:00:00", "prod"),
     ("9", "24:00:00", "preemptable"), ("4", "168:00:00", "capacity")],
)  # fmt: skip
def test_the_polaris_queue_depends_on_the_size_of_the_job(nodes, time, queue, capsys):
    script = write(capsys, "--site", "polaris", "--nodes", nodes, "--time", time)
    assert f"\n#PBS -q {queue}\n" in script
    assert ("#PBS -r y" in script) == (queue == "preemptable")


@pytest.mark.parametrize("program", [[], ["sweep"]], ids=["a job", "an array"])
def test_a_pbs_run_saves_before_the_time_limit_unless_told_otherwise(program, capsys):
    argv = [*program, "pbs", "--time"]
    rest = ["--", *SWEEP] if program else []
    for time, minutes in (("6:00:00", "342"), ("1:00:00", "45")):
        options = options_of(write(capsys, *argv, time, *rest))
        assert options[options.index("--exit_after") + 1] == minutes
    assert "--exit_after" not in write(capsys, *argv, "0:30:00", *rest)
    trainer = [*default_trainer(tuple(argv)), "--exit_after", "20"]
    options = options_of(write(capsys, *argv, "6:00:00", *rest, trainer=trainer))
    assert options.count("--exit_after") == 1


def test_the_end_that_a_configuration_sets_is_kept(tmp_path, capsys):
    (tmp_path / "my.toml").write_text(f'{MY_DATA}output_dir = "runs/a"\nexit_after = 20\n')
    script = write(capsys, "pbs", trainer=["--config", str(tmp_path / "my.toml")])
    assert "--exit_after" not in options_of(script)


@pytest.mark.parametrize("site", ["polaris", "frontier"])
def test_a_script_with_modules_stops_in_a_shell_without_them(site, tmp_path, capsys):
    make_environment(tmp_path / "venv")
    argv = ["--site", site, "--time", "1:00:00"]
    path = tmp_path / "script"
    for program, options in ([], TRAINER), (["prepare"], PREPARE):
        path.write_text(write(capsys, *program, *argv, "--account", "me", trainer=options))
        assert path.read_text().startswith("#!/bin/bash -l\n")
        done = subprocess.run(
            ["bash", str(path)],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env={"PATH": "/usr/bin:/bin", **RECORD},
        )
        assert (done.returncode, done.stderr) == (
            2,
            "This shell has no command 'module'; submit the script, or start it by bash -l.\n",
        )
    assert write(capsys, "pbs").startswith("#!/bin/bash\n")


def test_chains_and_arrays_avoid_queues_with_fewer_jobs_per_user(capsys):
    argv = ["--site", "polaris", "--nodes", "4", "--time", "1:00:00"]
    assert "#PBS -q debug-scaling\n" in write(capsys, *argv)
    assert "#PBS -q preemptable\n" in write(capsys, *argv, "--chain")
    assert "#PBS -q preemptable\n" in write(capsys, "sweep", *argv, "--", *SWEEP)
    two = write(capsys, *argv, "--chain", "--queue", "capacity")
    many = write(capsys, *argv, "--chain", "--queue", "preemptable")
    assert " && for _ in {2..2}; do" in two
    assert " && for _ in {2..4}; do" in many


def test_aurora_frontier_and_perlmutter_scripts_have_required_directives(capsys):
    aurora = write(capsys, "--site", "aurora", "--nodes", "2")
    assert "-l filesystems=home:flare" in aurora
    assert "module load frameworks" in aurora
    assert "GPUS=${GPUS:-12}" in aurora
    # ALCF's list for training: six ranks on each socket, and cores left to oneCCL's threads.
    assert (
        "--cpu-bind list:4-7:8-11:12-15:16-19:20-23:24-27:"
        "56-59:60-63:64-67:68-71:72-75:76-79\n" in aurora
    )
    assert "MASTER_ADDR=${MASTER_ADDR:-${HOSTS[0]%%.*}.hsn.cm.aurora.alcf.anl.gov}" in aurora
    frontier = directives(write(capsys, "--site", "frontier", "--nodes", "2", "--time", "2:00:00"))
    assert frontier["cpus-per-task"] == "7"
    assert frontier["gpu-bind"] == "closest"
    assert frontier["network"] == "disable_rdzv_get"
    perlmutter = directives(write(capsys, "--site", "perlmutter"))
    assert (perlmutter["constraint"], perlmutter["qos"]) == ("gpu", "regular")
    assert perlmutter["cpus-per-task"] == "128"


def test_a_requeued_job_is_signalled_and_appends_to_its_log(capsys):
    script = write(capsys, "slurm", "--requeue")
    assert directives(script)["signal"] == "B:USR1@300"
    assert "#SBATCH --requeue\n#SBATCH --open-mode=append\n" in script
    assert '"--signals_to_handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"' in script


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["slurm", "--site", "polaris"], "--site polaris knows pbs, not slurm"),
        (["pbs", "--requeue"], "--requeue is for slurm, not for pbs; --chain continues"),
        (["pbs", "--container", "a"], "--container is for slurm, not for pbs."),
        (["slurm", "--chain"], "--chain is for pbs; on slurm --requeue"),
        (["slurm", "--time", "soon"], "--time soon is not a time limit; write it as 6:00:00"),
        (["slurm", "--time", "24:00"], "--time 24:00 is not a time limit"),
        (["slurm", "--time", "25:99:00"], "--time 25:99:00 is not a time limit"),
        (["slurm", "--time", "6:00:60"], "--time 6:00:60 is not a time limit"),
        (["slurm", "--time", "1-24:00:00"], "--time 1-24:00:00 is not a time limit"),
        (["slurm", "--time", "9" * 5000], "is not a time limit; write it as 6:00:00"),
        (["--site", "polaris", "--nodes", "600"], "No queue takes --nodes 600"),
        (["--site", "polaris", "--queue", "prod"], "--queue prod does not take --nodes 1 for 360"),
        (["--site", "polaris", "--nodes", "20", "--time", "24:00:00"], "No queue takes --nodes 20"),
        (["--site", "frontier", "--nodes", "80"], "batch (1-91 nodes, 2 h)"),
        (["--site", "aurora", "--nodes", "32"], "No queue takes --nodes 32 for 360 minutes."),
        (["--site", "polaris", "--nodes", "16"], "; give --time 3:00:00 with --chain, or change"),
        (["--site", "frontier", "--nodes", "80"], "; give --time 2:00:00 with --requeue, or"),
        (
            ["--site", "polaris", "--chain", "--time", "60", "--queue", "debug-scaling"],
            "--queue debug-scaling does not take 2 jobs at once with --nodes 1 for 60 minutes.",
        ),
        (
            ["sweep", "--site", "polaris", "--queue", "capacity", "--", *SWEEP],
            "--queue capacity does not take 4 jobs at once with --nodes 1 for 360 minutes.",
        ),
        (
            ["--site", "polaris", "--time", "60", "--gpus_per_node", "8"],
            "--gpus_per_node 8 is more than the 4 devices of a node in debug of --site polaris;",
        ),
        (["--site", "aurora", "--cpus_per_gpu", "9"], "more than the 4 cores that this site has"),
        (["lsf"], "lsf"),
        (["slurm", "--sweep", "seed=1,2"], "--sweep is now a program with a table"),
        (["sweep", "slurm", "--", "--output_dir", "s", "--grid", "sead=1,2"], "no option --sead"),
        (
            ["sweep", "slurm", "--", "--output_dir", "s", "--nodes", "2", "--grid", "seed=1,2"],
            "write them in front of --",
        ),
        (["sweep", "slurm", "--requeue", "--", *SWEEP], "--requeue does not go with an array"),
        (["sweep", "pbs", "--chain", "--", *SWEEP], "--chain does not go with an array"),
        (["pbs", "--chain", "--time", "0:30:00"], "--chain needs a --time of more than 30 minutes"),
        (["slurm", "--requeue", "--time", "0:05:00"], "--requeue needs a --time of more than 30"),
        (["slurm", "--name", "my job"], "--name 'my job' contains a blank or another character"),
        (
            ["slurm", "--venv", "venv\nrm -r runs"],
            "--venv 'venv\\nrm -r runs' contains a line break",
        ),
        (["slurm", "--name", ""], "--name is empty; give it a value, or leave it out."),
        (["slurm", "--output", ""], "--output is given an empty path"),
        (["--nods", "3"], "There is no option --nods"),
    ],
)
def test_invalid_options_are_refused_in_one_sentence(argv, sentence, capsys):
    error = refuse(capsys, *argv)
    assert error.startswith("error: ")
    assert sentence in error
    assert error.count("\n") == 1


def test_the_trainers_options_are_checked_when_the_script_is_written(capsys):
    assert "There is no option --learning_rte" in refuse(
        capsys, "slurm", trainer=[*TRAINER, "--learning_rte", "1"]
    )
    assert "write them after --" in refuse(capsys, "slurm", trainer=[])


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ("--report_to tensorbord", "--report_to tensorbord is not a tracker; choose from aim,"),
        ("--data_path 0.5 a b", "--data_path gives b without a weight before it"),
        ("--data_path a --split half", "--split half is not a split; give up to three numbers"),
        (
            "--data_path a --max_train_steps 9 --lr_scheduler_type warmup_stable_decay "
            "--num_warmup_steps 5 --num_decay_steps 5",
            "--warmup (5 steps) and --decay (5 steps) are longer than the run of 9 steps",
        ),
    ],
)
def test_what_the_trainer_would_refuse_with_the_data_is_refused(options, sentence, capsys):
    trainer = ["--model_name_or_path", "gpt2", "--output_dir", "runs/a", *options.split()]
    trainer += ["--train_file", "a.txt"] if "--data_path" not in options else []
    error = refuse(capsys, "slurm", trainer=trainer)
    assert sentence in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("argv", "trainer", "sentence"),
    [
        (
            ["--nodes", "3"],
            ["--data_parallel", "gossip", "--topology", "exp"],
            "--topology exp takes a power of two of ranks",
        ),
        (
            ["--nodes", "3"],
            ["--tensor_parallel_size", "8"],
            "--tensor_parallel_size 8 is 8 ranks, which do not divide the 12 that there are",
        ),
        (
            ["--nodes", "3"],
            ["--global_batch_size", "64"],
            "--global_batch_size 64 is not a multiple of 96 (--per_device_train_batch_size 8 x 12",
        ),
        (
            ["--", "--output_dir", "s", "--grid", "tensor_parallel_size=2,8"],
            [],
            "--tensor_parallel_size 8 is 8 ranks, which do not divide the 4 that there are",
        ),
    ],
)
def test_what_the_trainer_would_refuse_on_the_jobs_ranks_is_refused(
    argv, trainer, sentence, capsys
):
    program = ["sweep", "slurm"] if "--grid" in argv else ["slurm"]
    options = default_trainer(tuple(program))
    assert sentence in refuse(capsys, *program, *argv, trainer=[*options, *trainer])


def test_a_file_that_is_there_is_not_replaced(tmp_path, capsys):
    path = tmp_path / "job.sh"
    assert main(["slurm", "--output", str(path), "--", *TRAINER]) == 0
    before = path.read_text()
    assert "--output" not in before.split("-- OPTIONS")[0]
    assert path.stat().st_mode & 0o111
    assert "already exists" in refuse(capsys, "pbs", "--output", str(path))
    assert path.read_text() == before


def test_the_program_says_what_a_script_still_needs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "web.bin").touch()
    trainer = ["--model_name_or_path", "gpt2", "--output_dir", "runs/a", "--data_path"]

    assert main(["slurm", "--output", "a.sh", "--", *trainer, "web"]) == 0
    said = capsys.readouterr().err
    assert "Added: --resume_from_checkpoint.\n" in said
    assert "Fill in __ALLOCATION__ before you submit, or give --account.\n" in said
    assert "Fill in __QUEUE__ before you submit, or give --partition.\n" in said
    assert "not on this machine" not in said
    assert "predict the rest: llm-trainers plan --nodes 1 --gpus_per_node 4 --device DEV" in said
    assert said.endswith("Submit it: sbatch a.sh\n")
    assert main(["slurm", "--output=-b c.sh", "--", *trainer, "web"]) == 0
    assert capsys.readouterr().err.endswith("Submit it: sbatch './-b c.sh'\n")

    assert main(["pbs", "--account", "a", "--queue", "b", "--", *trainer, "w"]) == 0
    said = capsys.readouterr().err
    assert "--data_path w is not on this machine; the job needs it.\n" in said
    assert "Fill in" not in said
    assert "Submit" not in said


@pytest.mark.parametrize(
    ("time", "minutes"),
    [("6:00:00", 360), ("0:30:00", 30), ("1-12:00:00", 2160), ("90", 90)],
)
def test_time_limits_are_read_as_people_write_them(time, minutes):
    assert read_minutes(time) == minutes


@pytest.mark.parametrize(
    ("status", "code", "queued_again"),
    [("preempted", 1, True), ("preempted", 75, True), ("finished", 0, False),
     ("failed", 1, False), ("running", 137, False), (None, 2, False)],
)  # fmt: skip
def test_only_a_run_that_this_start_has_preempted_is_queued_again(
    status, code, queued_again, tmp_path
):
    """With stand-ins for Slurm's clients; the former start was preempted as well."""
    run = tmp_path / "runs/gpt2"
    run.mkdir(parents=True)
    (run / "status.json").write_text('{\n "status": "preempted",\n "step": 4\n}\n')
    written = "" if status is None else f'{{\n "status": "{status}",\n "step": 9\n}}\n'
    (tmp_path / "programs").mkdir()
    programs = {
        "scontrol": 'case $1 in show) echo node1 ;; *) echo "scontrol $*" >>asked ;; esac',
        "srun": f"""case "$*" in *preflight*) exit 0 ;; esac
            [ -z '{written}' ] || printf '%s' '{written}' >{run}/status.json
            exit {code}""",
    }
    for name, text in programs.items():
        (tmp_path / "programs" / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / "programs" / name).chmod(0o755)
    make_environment(tmp_path / "venv")
    script = EXAMPLES / "slurm/requeue.sh"

    done = subprocess.run(
        ["bash", str(script)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={
            **RECORD,
            "PATH": f"{tmp_path / 'programs'}:/usr/bin:/bin",
            "SLURM_JOB_ID": "41",
        },
    )

    assert done.returncode == code, done.stderr
    asked = tmp_path / "asked"
    assert (asked.read_text() if asked.exists() else "") == (
        "scontrol requeue 41\n" if queued_again else ""
    )


def test_what_the_script_adds_is_checked_with_the_trainers_options(capsys):
    error = refuse(capsys, "slurm", trainer=[*TRAINER, "--overwrite_output_dir"])
    assert "--resume_from_checkpoint keeps the run and --overwrite_output_dir removes it" in error


def test_the_requested_number_of_cores_is_bound(capsys):
    asked = ("--site", "polaris", "--cpus_per_gpu", "16", "--launcher", "task_per_gpu")
    script = write(capsys, *asked, "--time", "1:00:00")
    assert "--cpu-bind depth --depth 16" in script
    assert "OMP_NUM_THREADS=16" in script


PREPARE = ["--input", "text/*.jsonl", "--tokenizer_name", "gpt2", "--output_prefix", "data/web"]


def write_preparation(capsys, *argv: str, options: list[str] = PREPARE) -> str:
    return write(capsys, "prepare", *argv, trainer=options)


def test_a_preparation_starts_once_on_each_node_of_slurm(capsys):
    script = write_preparation(capsys, "slurm", "--nodes", "10", "--time", "2:00:00")

    found = directives(script)
    assert (found["nodes"], found["ntasks-per-node"], found["time"]) == ("10", "1", "02:00:00")
    assert options_of(script) == PREPARE
    assert 'srun --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1' in script
    assert "# Made by: llm-trainers jobs prepare slurm --nodes 10 --time 2:00:00 --" in script


def test_a_preparation_starts_once_on_each_node_of_polaris(capsys):
    script = write_preparation(capsys, "--site", "polaris", "--nodes", "10", "--time", "2:00:00")

    assert "\n#PBS -q debug-scaling\n" not in script  # which allows an hour
    assert "\n#PBS -q prod\n#PBS -l select=10:system=polaris\n" in script
    assert '-n "${#HOSTS[@]}" --ppn 1\n    --cpu-bind none\n' in script
    assert options_of(script) == PREPARE


@pytest.mark.parametrize(
    ("argv", "options", "fault"),
    [
        (["slurm"], [], "The options of llm-trainers prepare are missing: write them after --."),
        (["slurm"], PREPARE[2:], "Name the text with either --input or --dataset_name."),
        (["slurm"], [*PREPARE, "--executor", "dask"], "--executor dask does not go into this"),
        (["slurm"], [*PREPARE, "--rank", "0", "--world_size", "2"], "--rank does not go into this"),
        (["pbs", "--nodes", "2"], [*PREPARE, "--overwrite"], "--overwrite goes with one process"),
        (["pbs", "--site", "frontier"], PREPARE, "--site frontier knows slurm, not pbs; write"),
        (["slurm", "--nodes", "0"], PREPARE, "--nodes"),
    ],
)
def test_a_preparation_that_cannot_work_is_one_sentence(capsys, argv, options, fault):
    (line,) = refuse(capsys, "prepare", *argv, trainer=options).splitlines()
    assert fault in line


@pytest.mark.parametrize("scheduler", ["slurm", "pbs"])
def test_shellcheck_finds_nothing_in_the_script_of_a_preparation(capsys, tmp_path, scheduler):
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed")
    script = tmp_path / "job.sh"
    script.write_text(write_preparation(capsys, scheduler, "--nodes", "2"))

    done = subprocess.run(["shellcheck", str(script)], capture_output=True, text=True)

    assert done.stdout == ""
