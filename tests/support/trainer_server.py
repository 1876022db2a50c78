"""Runs trainers whose packages differ, forked from one process that has imported PyTorch once."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_SERVER = """
import json, os, sys
import accelerate, torch.distributed.fsdp, torch.utils.tensorboard  # once for all packages
import transformers.models.auto.tokenization_auto, transformers.models.gpt2.modeling_gpt2

def wait(child):
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

def live(package, lives, log):
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT), 1)
    os.dup2(1, 2)
    os.chdir(package)
    os.environ["PYTHONPATH"] = sys.path[0] = package
    import llm.trainers.gpt.train  # once; each start is a forked process
    from llm.trainers.gpt.main import main
    codes = []
    for argv in lives:
        child = os.fork()
        if child == 0:
            os._exit(main(argv))
        codes.append(wait(child))
    open(log + ".codes", "w").write(json.dumps(codes))

for line in sys.stdin:
    child = os.fork()
    if child == 0:
        live(*json.loads(line))
        os._exit(0)
    print(wait(child), flush=True)
"""


class TrainerServer:
    """Runs the trainer once for each command line; returns exit codes and output."""

    def __init__(self) -> None:
        environment = os.environ | {"PYTHONPATH": "", "HF_HUB_OFFLINE": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-c", _SERVER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def run(self, folder: Path, *lives: list[str]) -> tuple[list[int], str]:
        """Run commands with a folder as the first one that Python searches for modules."""
        log = folder / "lives.log"
        log.unlink(missing_ok=True)
        print(json.dumps([str(folder), lives, str(log)]), file=self.process.stdin, flush=True)
        code = self.process.stdout.readline()
        output = log.read_text(encoding="utf-8")
        assert code == "0\n", output
        return json.loads(Path(f"{log}.codes").read_text()), output


@contextmanager
def trainer_server() -> Iterator[TrainerServer]:
    server = TrainerServer()
    yield server
    server.process.communicate()
