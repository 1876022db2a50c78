import os
import platform
import socket
import subprocess
import sys
import time

import pytest
import torch

from llm.tools.preflight import describe_differences, describe_slow_link, main
from tests.support.faults import Fault, install
from tests.support.ranks import free_port, run_ranks, values

HERE = socket.gethostname()
COMMAND = ["--message_mb", "1", "--timeout", "3"]
HANG = Fault(at="llm.tools.preflight:time_collectives", what="wait", amount=60, rank=1)
STOP_IN_REDUCTION = Fault(at="torch.distributed:all_reduce", what="wait", amount=60, rank=1, call=2)
DIE = Fault(at="llm.tools.preflight:time_collectives", what="SIGKILL", rank=1)


def preflight(faults=()):
    install(faults)
    return main(COMMAND)


def test_every_rank_reports_host_device_versions_and_times():
    outcomes = run_ranks(preflight, 2)
    assert values(outcomes) == [0, 0]
    # Before 2.13, PyTorch prints lines, too.
    printed = [o.output.splitlines() for o in outcomes]
    lines, others = [[x for x in each if not x.startswith("[Gloo]")] for each in printed]
    for rank in (0, 1):
        assert lines[rank].startswith(f"rank {rank} on {HERE}: cpu ({platform.machine()})")
        assert f"torch {torch.__version__}" in lines[rank]
        assert f"python {platform.python_version()}" in lines[rank]
        assert "all-reduce" in lines[rank]
        assert "broadcast" in lines[rank]
    assert lines[2].startswith(f"preflight: OK: 2 ranks on {HERE}; 1 MiB: all-reduce ")
    assert others == []


@pytest.mark.extended
def test_a_host_that_does_not_answer_is_named():
    began = time.monotonic()
    (rank_0,) = run_ranks(
        preflight,
        1,
        environment={"WORLD_SIZE": "4", "SLURM_JOB_NODELIST": f"{HERE},lost[7-9]"},
    )
    assert rank_0.value == 1
    assert "preflight: 3 of 4 ranks have not answered within 3 s: 1, 2, 3." in rank_0.output
    assert "These hosts do not answer: lost7, lost8, lost9." in rank_0.output
    assert "--exclude=lost7,lost8,lost9" in rank_0.output
    assert time.monotonic() - began < 15


@pytest.mark.extended
def test_a_rank_0_that_does_not_answer_is_named_by_the_others():
    (rank_1,) = run_ranks(preflight, 1, environment={"WORLD_SIZE": "2", "RANK": "1"})
    assert rank_1.value == 1
    assert f"rank 1 on {HERE} does not reach rank 0 at 127.0.0.1" in rank_1.output


@pytest.mark.extended
def test_a_rank_0_that_does_not_answer_costs_one_line():
    environment = os.environ | {"RANK": "1", "WORLD_SIZE": "2"}
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    environment.pop("TORCH_CPP_LOG_LEVEL", None)  # other tests set it in this process
    command = [sys.executable, "-m", "llm", "preflight", "--timeout", "1"]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert result.returncode == 1
    [sentence] = result.stderr.splitlines()
    assert sentence.startswith(f"preflight: rank 1 on {HERE} does not reach rank 0 at 127.0.0.1")


@pytest.mark.parametrize(
    "fault", [HANG, pytest.param(DIE, marks=pytest.mark.faults)], ids=["hangs", "dies"]
)
def test_a_rank_that_keeps_the_others_waiting_is_named(fault):
    rank_0, rank_1 = run_ranks(preflight, 2, [fault])
    assert rank_0.value == 1
    assert f"rank 1 on {HERE} did not get beyond start within 3 s; the others did." in rank_0.output
    assert rank_1.value == (1 if fault is HANG else None)


@pytest.mark.extended
def test_ranks_that_all_wait_in_a_collective_point_to_the_network():
    # The first reduction is done; the second never is.
    rank_0, _ = run_ranks(preflight, 2, [STOP_IN_REDUCTION])
    assert rank_0.value == 1
    assert "All ranks have answered, and none got beyond all-reduce within 3 s" in rank_0.output
    assert "NCCL_SOCKET_IFNAME" in rank_0.output


def fail_on_rank_1():
    if os.environ["RANK"] == "1":
        torch.distributed.broadcast = lambda *_, **__: torch.zeros(1, device="no device")
    return main([*COMMAND, "--timeout", "30"])


def test_a_failing_rank_ends_the_wait_at_once_with_its_reason():
    began = time.monotonic()
    outcomes = run_ranks(fail_on_rank_1, 2)
    assert [outcome.value for outcome in outcomes] == [1, 1]
    assert f"rank 1 on {HERE} fails: RuntimeError: " in outcomes[0].output
    assert time.monotonic() - began < 25


def said(host="a", device="cuda:0", number=None, **versions):
    return {
        "host": host,
        "device": device,
        "id": number,
        "versions": {"torch": "2.13.0", "python": "3.12.1", **versions},
    }


@pytest.mark.parametrize(
    ("message_mb", "seconds", "gbit"),
    [(64, 0.01, None), (64, 0.5, None), (64, 0.6, "0.89"), (1, 0.2, "0.042")],
)
def test_a_link_below_one_gbit_is_called_slow(message_mb, seconds, gbit):
    found = describe_slow_link(message_mb, seconds)

    if gbit is None:
        assert found == ""
    else:
        assert f"{message_mb} MiB take {seconds} s, which is {gbit} Gbit/s. Choose a " in found


def test_ranks_that_are_alike_have_no_differences():
    assert describe_differences({0: said(), 1: said("b")}) == ""


def test_versions_that_differ_are_named_with_their_ranks():
    found = describe_differences({0: said(), 1: said(), 2: said("b", torch="2.14.0")})
    assert found == "The ranks differ in torch: 2.13.0 on rank 0, 1; 2.14.0 on rank 2."


def test_a_host_that_has_lost_its_gpus_is_named():
    found = describe_differences({0: said(), 1: said("b", device="cpu", nccl="2.30")})
    assert "The ranks differ in the kind of device: cuda on rank 0; cpu on rank 1." in found


def test_two_ranks_on_one_gpu_are_named():
    found = describe_differences(
        {0: said(number="GPU-1"), 1: said(number="GPU-1"), 2: said(number="GPU-2")}
    )
    assert found == "Ranks 0 and 1 share one device of a."


def test_a_rank_with_a_broken_device_is_reported(capsys, monkeypatch):
    def fail(world):
        raise RuntimeError("CUDA error: uncorrectable ECC error encountered\nMore lines.")

    monkeypatch.setattr("llm.tools.preflight.device_of", fail)
    assert main([]) == 1
    assert capsys.readouterr().err == (
        f"preflight: rank 0 on {HERE} has no working device: CUDA error: uncorrectable ECC "
        "error encountered\n"
    )


def test_a_process_alone_reports_itself(capsys, monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert main([]) == 0
    assert capsys.readouterr().out.splitlines()[1] == "preflight: one process, alone."


def test_ranks_without_the_address_of_rank_0_ask_for_it(capsys, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    assert main([]) == 2
    assert "MASTER_ADDR" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "value", "most"),
    [
        ("timeout", "1e300", "86400"),
        ("timeout", "1e10", "86400"),
        ("message_mb", "1" * 20, "1000000"),
    ],
)
def test_values_that_no_machine_can_have_are_refused(option, value, most, capsys):
    assert main([f"--{option}", value]) == 2
    assert f"error: --{option} must be at most {most}" in capsys.readouterr().err


@pytest.mark.extended
def test_torchrun_starts_it_too():
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*command, "--nproc_per_node", "2", "-m", "llm", "preflight", *COMMAND, "--timeout", "60"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert "2 ranks" in done.stdout
