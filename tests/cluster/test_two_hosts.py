"""Training on two hosts: network namespaces of this machine, with one link between them."""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.delayed_link import DelayedNetwork, why_not
from tests.support.training import Bench, Run

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(why_not() is not None, reason=str(why_not())),
]

STEPS = 60


@pytest.fixture
def network():
    """Two hosts that know each other's name."""
    made = DelayedNetwork(2)
    hosts = "".join(f"{made.address(host)} host{host}\n" for host in (0, 1))
    # `ip netns exec` puts these files in the place of those in /etc.
    folders = [Path("/etc/netns") / made.inside(host, [])[-1] for host in (0, 1)]
    for folder in folders:
        folder.mkdir(parents=True)
        (folder / "hosts").write_text(f"127.0.0.1 localhost\n{hosts}")
    with made.up():
        yield made
    for folder in folders:
        shutil.rmtree(folder)


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    return Bench(tmp_path_factory.mktemp("hosts"))


@pytest.fixture(scope="module")
def straight(bench):
    """A run on one host, with which the others are compared."""
    made = bench.train("straight", ranks=2, timeout=240, **options())
    assert made.codes == [0, 0], made.output
    return made


def options(**changes):
    return {"max_train_steps": STEPS, "checkpointing_steps": 10, **changes}


def start(network, host, module, *words, **environment):
    """Start torchrun with one process on a host."""
    torchrun = [
        sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc_per_node=1",
        "--max_restarts=0", "--rdzv_id=1", "--rdzv_backend=c10d",
        "--rdzv_endpoint=host0:29400",
    ]  # fmt: skip
    variables = {**os.environ, **network.environment(), "OMP_NUM_THREADS": "1", **environment}
    variables["PYTHONPATH"] = str(Path(__file__).parents[2])
    del variables["MASTER_ADDR"]  # which torchrun finds out
    named = ["unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', f"host{host}"]
    return subprocess.Popen(
        network.inside(host, [*named, *torchrun, "-m", module, *map(str, words)]),
        env=variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def start_on_both(network, module, *words):
    return [start(network, host, module, *words) for host in (0, 1)]


def outputs(processes, timeout=240):
    try:
        return [process.communicate(timeout=timeout)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()


def stops(folder):
    """The reasons for which the ranks of a run have ended."""
    lines = (folder / "events.jsonl").read_text().splitlines()
    return [event["reason"] for event in map(json.loads, lines) if event["event"] == "stop"]


def weights(run):
    return (run.folder / "model.safetensors").read_bytes()


def test_a_run_over_two_hosts_has_the_losses_of_one_host(network, bench, straight):
    processes = start_on_both(network, "llm.trainers.gpt", *bench.command("both", **options()))
    first, second = outputs(processes)

    assert [process.returncode for process in processes] == [0, 0], first + second
    run = Run(bench.folder / "both", [])
    assert "world: 2 ranks" in first + second
    assert run.losses == straight.losses
    assert weights(run) == weights(straight)


def test_a_link_that_breaks_ends_the_run_with_the_lost_rank_and_it_resumes(
    network, bench, straight
):
    # Without an end: it breaks in the middle, however fast the machine is.
    words = bench.command("broken", **options(max_train_steps=100_000, timeout=5))
    processes = start_on_both(network, "llm.trainers.gpt", *words)
    metrics = bench.folder / "broken" / "metrics.jsonl"
    end = time.monotonic() + 200
    while not metrics.exists() or metrics.read_bytes().count(b'"loss":') < 15:
        assert time.monotonic() < end, "it does not train"
        time.sleep(0.05)
    subprocess.run(network.inside(1, ["ip", "link", "set", "link0", "down"]), check=True)
    # Both ranks end; the torchrun of the host without a link waits for its peer much longer.
    outputs(processes[:1])
    while len(reasons := stops(bench.folder / "broken")) < 2:
        assert time.monotonic() < end, "a rank does not end"
        time.sleep(0.1)
    processes[1].kill()

    assert any(reason.startswith("rank 1 on host1 hangs: no ") for reason in reasons), reasons

    subprocess.run(network.inside(1, ["ip", "link", "set", "link0", "up"]), check=True)
    words = bench.command(
        "broken", **options(resume_from_checkpoint=True, change_on_resume="max_train_steps")
    )
    processes = start_on_both(network, "llm.trainers.gpt", *words)
    first, second = outputs(processes)
    assert [process.returncode for process in processes] == [0, 0], first + second
    assert weights(Run(bench.folder / "broken", [])) == weights(straight)


def test_the_preflight_warns_of_a_slow_link(network):
    network.delay = 0.1
    processes = start_on_both(network, "llm", "preflight", "--message_mb", "1")
    first, second = outputs(processes)

    (found,) = re.findall(r"1 MiB: [\w-]+ ([\d.]+) ms", first + second)
    assert float(found) >= 100
    assert "preflight: warning: The link between the hosts is slow: 1 MiB take 0." in first + second
    assert [process.returncode for process in processes] == [0, 0]


def test_the_preflight_names_a_host_that_does_not_resolve(tmp_path):
    environment = {
        **os.environ,
        "RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "node7.invalid",
        "MASTER_PORT": "29511",
    }
    command = [sys.executable, "-m", "llm", "preflight", "--timeout", "5"]

    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)

    assert done.returncode == 1
    assert "does not reach rank 0 at node7.invalid, port 29511:" in done.stderr.splitlines()[-1]
