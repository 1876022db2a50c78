"""Job scripts at toy size, and what becomes of them in a scheduler."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from llm.tools.jobs.jobs import main as write_job
from tests.support.training import Bench, Run

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
EXAMPLES = ROOT / "examples"

IN_QUEUE = ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "REQUEUED")
"""States of a job that has not ended."""

# What an example is given for its OPTIONS; those that depend on the script's variables stay.
TOY = {"max_train_steps": 300, "checkpointing_steps": 100, "logging_steps": 1}


# `llm-trainers prepare` with small shards; rank 1 is killed after three of them, once.
DYING_PREPARATION = """
import os, signal, sys, time
from pathlib import Path
from llm.prepare import prepare_files, tokenize_shards
from llm.prepare.prepare import main
prepare_files.SHARD_BYTES = 200
write_shard = tokenize_shards.write_shard
written = []
def dying(*how, **options):
    rank = os.environ.get("SLURM_PROCID", os.environ.get("PMI_RANK"))
    if rank == "1" and len(written) == 3 and not Path("{output}.killed").exists():
        Path("{output}.killed").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    written.append(how)
    return write_shard(*how, **options)
tokenize_shards.write_shard = dying
sys.exit(main([*sys.argv[1:], "--workers", "1"]))
"""


# Ranks of srun and mpiexec find no device on a host.
BROKEN_DEVICE = """
import os, socket
if socket.gethostname() == "{host}" and {{"SLURM_PROCID", "PMI_RANK"}} & os.environ.keys():
    import llm.runtime.world
    def fail(*_):
        raise RuntimeError("the driver does not answer")
    llm.runtime.world.device_of = fail
"""


def missing(*programs: str) -> list[str]:
    """Those of the programs that this machine does not have."""
    path = os.environ["PATH"] + ":/usr/sbin:/sbin"
    return [name for name in programs if shutil.which(name, path=path) is None]


class Submission:
    """A folder from which jobs are submitted: scripts filled in at toy size, data, runs.

    Args:
        folder: Where; a new one.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.bench = Bench(folder / "bench")
        activate = folder / "venv/bin/activate"
        activate.parent.mkdir(parents=True)
        activate.write_text(
            f'export PATH={Path(sys.executable).parent}:"$PATH" PYTHONPATH={ROOT}\n'
        )
        # Bash reads this at the start of a job, as it reads a site's profile.
        (folder / "profile.sh").write_text(
            'module() { echo "module $*"; }\nconda() { echo "conda $*"; }\n'
        )

    def fill_in(self, example: str, *, run: str, **options: object) -> Path:
        """Write an example's script with everything filled in and tiny options."""
        text = self.example(example).read_text()
        settings = {**TOY, "output_dir": f"runs/{run}", **options}
        words = self.bench.command(run, **settings)
        rows = text.split("OPTIONS=(\n")[1].split("\n)\n")[0].splitlines()
        kept = [row for row in rows if "$" in row or "--resume" in row]
        filled = text.replace("\n".join(rows), "\n".join([" ".join(words), *kept]))
        return self._write(f"{run}-{Path(example).name}", filled)

    def with_spare_node(self, scheduler: str, *, run: str, broken: str) -> Path:
        """Write a script for two nodes and a spare one, where a host has no working device."""
        site = self.folder / f"{run}-site"
        site.mkdir()
        (site / "sitecustomize.py").write_text(BROKEN_DEVICE.format(host=broken))
        venv = self.folder / f"{run}-venv"
        (venv / "bin").mkdir(parents=True)
        activate = (self.folder / "venv/bin/activate").read_text()
        (venv / "bin/activate").write_text(f'{activate}PYTHONPATH="{site}:$PYTHONPATH"\n')
        script = self.folder / f"{run}.sh"
        job = (
            scheduler,
            "--nodes",
            2,
            "--spare_nodes",
            1,
            "--gpus_per_node",
            1,
            "--cpus_per_gpu",
            1,
        )
        made = ("--time", 10, "--account", "science", "--queue", "debug", "--venv", venv)
        options = self.bench.command(
            run, **{**TOY, "max_train_steps": 20}, output_dir=f"runs/{run}"
        )
        words = (*job, *made, "--output", script, "--", *options)
        assert write_job([str(word) for word in words]) == 0
        return script

    def fill_in_preparation(self, example: str, *, output: str) -> Path:
        """Write an example's script that prepares a small text."""
        (self.folder / "a.jsonl").write_text('{"text": "To be, or not to be"}\n' * 3)
        text = self.example(example).read_text()
        for name, value in {
            "INPUT": "'*.jsonl'",
            "TOKENIZER": EXAMPLES / "tokenizer",
            "OUTPUT_PREFIX": f"data/{output}",
        }.items():
            text = text.replace(f"__{name}__", str(value))
        return self._write(Path(example).name, text)

    def preparation_on_nodes(self, scheduler: str, *, output: str) -> Path:
        """Write a script for two nodes, on which rank 1 kills itself in the first job."""
        lines = [json.dumps({"text": f"document {number}"}) + "\n" for number in range(400)]
        (self.folder / "b.jsonl").write_text("".join(lines))
        (self.folder / "prepare.py").write_text(DYING_PREPARATION.format(output=output))
        script = self.folder / f"{output}.sh"
        job = ("prepare", scheduler, "--nodes", 2, "--time", 10, "--account", "science")
        made = ("--queue", "debug", "--output", script, "--", *self.preparation(output))
        assert write_job([str(word) for word in (*job, *made)]) == 0
        text = script.read_text()
        script.write_text(text.replace("llm-trainers prepare", "python prepare.py"))
        return script

    def preparation(self, output: str) -> list[str]:
        """Options of `llm-trainers prepare` that write an output in `data`."""
        tokenizer = str(EXAMPLES / "tokenizer")
        options = ["--input", "b.jsonl", "--tokenizer_name", tokenizer]
        return [*options, "--output_prefix", f"data/{output}"]

    def check_prepared(self, output: str) -> None:
        """Compare the files with those of one process."""
        alone = f"{output}-alone"
        options = [*self.preparation(alone), "--workers", "1"]
        command = [sys.executable, "-m", "llm", "prepare", *options]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        subprocess.run(command, cwd=self.folder, env=environment, check=True, timeout=240)
        for kind in ("bin", "idx"):
            made, expected = (
                self.folder / f"data/{name}_text_document.{kind}" for name in (output, alone)
            )
            assert made.read_bytes() == expected.read_bytes()
        assert not (self.folder / f"data/{output}_text_document.parts").exists()

    def _write(self, name: str, text: str) -> Path:
        for placeholder, value in {
            "ALLOCATION": "science",
            "QUEUE": "debug",
            "IMAGE": "lab/llm:1",
        }.items():
            text = text.replace(f"__{placeholder}__", str(value))
        script = self.folder / name
        assert "\nVENV=${VENV:-" in text or "\nIMAGE=" in text  # "venv", where jobs are submitted
        script.write_text(text)
        return script

    def example(self, name: str) -> Path:
        """An example as it is shipped."""
        return EXAMPLES / name

    def run(self, name: str) -> Run:
        """The run that a job has written."""
        return Run(self.folder / "runs" / name, [])

    def status(self, name: str) -> str:
        """What the run says of itself; empty as long as it has not begun."""
        if not (self.folder / "runs" / name / "status.json").exists():
            return ""
        return str(self.run(name).read_json("status.json")["status"])

    def wait_for_status(self, name: str, status: str, timeout: float) -> None:
        """Wait until the run says this of itself."""
        end = time.monotonic() + timeout
        while self.status(name) != status:
            assert time.monotonic() < end, f"{name} is still {self.status(name)}"
            time.sleep(0.3)

    def weights(self, name: str) -> bytes:
        """The trained model, byte for byte."""
        return (self.folder / "runs" / name / "model.safetensors").read_bytes()

    def wait_for_step(self, name: str, step: int, timeout: float = 120) -> None:
        """Wait until the run has done so many steps."""
        metrics = self.folder / "runs" / name / "metrics.jsonl"
        end = time.monotonic() + timeout
        while not metrics.exists() or metrics.read_bytes().count(b'"loss":') < step:
            assert time.monotonic() < end, f"{name} does not reach step {step}"
            time.sleep(0.05)


@dataclass
class Slurm:
    """A running cluster of two nodes.

    Attributes:
        environment: Where its clients find it.
    """

    environment: Mapping[str, str]

    def call(self, *command: object, cwd: Path | None = None) -> str:
        """Run a client; returns what it prints."""
        done = subprocess.run(
            [str(word) for word in command],
            cwd=cwd,
            env={
                **os.environ,
                **self.environment,
                **({} if cwd is None else {"BASH_ENV": str(cwd / "profile.sh"), "VENV": "venv"}),
            },
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def submit(self, script: Path, *options: object, then: Sequence[object] = ()) -> int:
        """Submit a script from its folder, with arguments of its own; returns the job's number."""
        words = ("sbatch", "--parsable", *options, script.name, *then)
        printed = self.call(*words, cwd=script.parent)
        return int(printed.split(";")[0])

    def job_info(self, job: int | str) -> dict[str, str]:
        """What Slurm knows of a job."""
        shown = self.call("scontrol", "--oneliner", "show", "job", job)
        return dict(re.findall(r"(\w+)=(\S*)", shown))

    def wait(self, job: int | str, timeout: float = 240) -> str:
        """Wait until a job has ended; returns its state, such as COMPLETED."""
        end = time.monotonic() + timeout
        while True:
            state = self.job_info(job)["JobState"]
            if state not in IN_QUEUE:
                return state
            assert time.monotonic() < end, f"job {job} is still {state}"
            time.sleep(0.3)

    def restarts(self, job: int) -> int:
        """How often a job was put into the queue again."""
        return int(self.job_info(job)["Restarts"])


def run_pbs(script: Path, *, hosts: list[str], job: str, ranks: int) -> subprocess.CompletedProcess:
    """Run a PBS script as its first host would, with mpiexec's stand-in; ranks for each host."""
    nodes = script.parent / "nodes"
    nodes.write_text("".join(f"{host}\n" for host in hosts))
    process = subprocess.Popen(
        ["unshare", "--uts", "sh", "-c", 'hostname "$1"; exec bash "$2"', "sh", hosts[0], script],
        cwd=script.parent,
        env={
            **os.environ,
            "PATH": f"{HERE / 'pbs'}:{os.environ['PATH']}",
            "BASH_ENV": str(script.parent / "profile.sh"),
            "PBS_NODEFILE": str(nodes),
            "PBS_JOBID": job,
            "PBS_O_WORKDIR": str(script.parent),
            "GPUS": str(ranks),
            "VENV": "venv",
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=240)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    return subprocess.CompletedProcess(script, process.returncode, output)
