"""Shards written by a Dask cluster; each process of the cluster is killed once."""

import os
import pickle
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from llm.errors import DataError
from llm.prepare import dask_cluster
from llm.prepare.prepare import main
from tests.support.processes import wait_until
from tests.support.texts import expected_pair, json_lines, pair, write

pytest.importorskip("distributed", reason="pip install 'llm-trainers[dask]'")

TEXTS = [f"document {number}: " + "the dog sleeps, " * (number % 9) for number in range(44)]
GOOD = ["--input", "a.jsonl", "--tokenizer_name", "tokenizer", "--executor", "dask"]
ON_CLUSTER = ["--scheduler_file", "scheduler.json"]

CLIENT = """
import sys
from llm.prepare import prepare_files
from llm.prepare.prepare import main
prepare_files.SHARD_BYTES = 200
sys.exit(main(sys.argv[1:]))
"""
# Each shard takes some time, so that there is a middle.
WORKER = """
import time
from llm.prepare import dask_cluster, shards
def slow(*how, **options):
    time.sleep(0.2)
    return shards.write_shard(*how, **options)
dask_cluster.write_shard = slow
"""

pytestmark = pytest.mark.usefixtures("at_home")


class Cluster:
    """A scheduler and workers of one thread, as processes in the current folder."""

    def __init__(self, workers):
        Path("slow_shards.py").write_text(WORKER)
        self.processes = []
        self.scheduler = self._start("dask_scheduler", "--port", "0", "--host", "127.0.0.1")
        wait_until(Path("scheduler.json").exists)
        self.workers = [
            self._start("dask_worker", "--nthreads", "1", "--no-nanny", "--preload=slow_shards.py")
            for _ in range(workers)
        ]

    def _start(self, program, *words):
        command = [sys.executable, "-m", f"distributed.cli.{program}", *words, "--no-dashboard"]
        with open("cluster.log", "a") as log:
            process = subprocess.Popen(
                [*command,
                 "--scheduler-file", "scheduler.json"], stdout=log, stderr=log
            )  # fmt: skip
        self.processes.append(process)
        return process

    def end(self):
        for process in self.processes:
            process.kill()
            process.wait()


@pytest.fixture
def cluster(tmp_path):
    made = Cluster(2)
    yield made
    made.end()


def start(*words):
    return subprocess.Popen(
        [sys.executable, "-c", CLIENT, *GOOD, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def shards_done(output):
    return {path.stem for path in Path(f"{output}_text_document.parts").glob("[0-9]*.json")}


@pytest.mark.faults
def test_the_bytes_survive_the_death_of_client_worker_and_scheduler(tmp_path, cluster):
    write(tmp_path / "a.jsonl", json_lines(TEXTS))
    words = [*ON_CLUSTER, "--output_prefix", "out"]
    client = start(*words)
    wait_until(lambda: len(shards_done("out")) >= 3)
    client.kill()
    client.communicate()

    client = start(*words)
    wait_until(lambda: len(shards_done("out")) >= 8)
    os.kill(cluster.workers[0].pid, signal.SIGKILL)
    output, _ = client.communicate(timeout=120)

    assert client.returncode == 0, output
    assert "resuming in out_text_document.parts: " in output
    assert pair("out_text_document") == expected_pair(tmp_path / "e", TEXTS)

    words[-1] = "next"
    client = start(*words)
    wait_until(lambda: len(shards_done("next")) >= 3)
    cluster.scheduler.kill()
    output, _ = client.communicate(timeout=120)

    assert client.returncode == 2
    assert output.splitlines()[-1].startswith("error: The Dask scheduler has stopped, perhaps ")
    assert "shards are kept in next_text_document.parts" in output
    assert "Traceback" not in output, output
    assert main([*GOOD[:-2], "--output_prefix", "next", "--workers", "1"]) == 0
    assert pair("next_text_document") == expected_pair(tmp_path / "e", TEXTS)


@pytest.mark.parametrize(
    ("words", "variables", "fault"),
    [
        ([], {}, "--executor dask finds no scheduler; export DASK_SCHEDULER_ADDRESS, or give"),
        (ON_CLUSTER, {}, "--scheduler_file scheduler.json does not exist; start the scheduler."),
        ([], {"DASK_SCHEDULER_ADDRESS": "tcp://127.0.0.1:9"}, "tcp://127.0.0.1:9 does not answer"),
        (["--workers", "2"], {}, "--executor dask goes without --workers and --rank: the cluster"),
        ([], {"RANK": "1", "WORLD_SIZE": "2"}, "goes with one process, and this is rank 1 of 2;"),
    ],
    ids=["address", "file", "silent", "workers", "ranks"],
)
def test_a_cluster_that_cannot_be_used_is_one_sentence(
    tmp_path, monkeypatch, capsys, words, variables, fault
):
    write(tmp_path / "a.jsonl", json_lines(TEXTS))
    monkeypatch.setattr("llm.prepare.dask_cluster._CONNECT_TIMEOUT_SECONDS", 1)
    monkeypatch.delenv("DASK_SCHEDULER_ADDRESS", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)

    assert main([*GOOD, "--output_prefix", "out", *words]) == 2

    (line,) = capsys.readouterr().err.splitlines()
    assert fault in line


def test_without_dask_a_sentence_says_what_to_install(tmp_path, monkeypatch, capsys):
    write(tmp_path / "a.jsonl", json_lines(TEXTS))
    monkeypatch.setitem(sys.modules, "distributed", None)

    assert main([*GOOD, "--output_prefix", "out"]) == 2

    assert capsys.readouterr().err.endswith("needs Dask: pip install 'llm-trainers[dask]'\n")


def test_a_worker_that_does_not_see_the_output_is_named(tmp_path):
    with pytest.raises(DataError, match=r"does not find /.*/encoding-0.pickle; start the workers"):
        dask_cluster._get_cached_encoder(tmp_path / "encoding-0.pickle", allow_fast=True)


def test_an_encoding_that_the_client_has_not_written_is_not_unpickled(tmp_path):
    class Intruder:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "code has run",))

    file = write(tmp_path / f"encoding-{'0' * 64}.pickle", pickle.dumps(Intruder()))

    with pytest.raises(DataError, match=r"encoding-0+\.pickle has changed since this command"):
        dask_cluster._get_cached_encoder(file, allow_fast=True)

    assert not (tmp_path / "code has run").exists()
