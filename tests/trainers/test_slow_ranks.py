"""A rank that keeps the others waiting is named, with its host and what it is slow at."""

import re
import socket

import pytest

from tests.support.faults import Fault
from tests.support.training import Bench

FORWARD, DATA, SAVE = (
    "llm.models.loss:LanguageModelLoss.forward",
    "llm.data.loader:_to_device",  # reading would be hidden behind a step on a busy machine
    "llm.checkpoint.save:sync_file",
)
OPTIONS = {"logging_steps": 2, "max_train_steps": 8, "max_eval_steps": 1}


def sleeping(rank: int, at: str, seconds: float) -> Fault:
    return Fault(at=at, what="wait", call=0, rank=rank, amount=seconds)


def named(output: str) -> set[str]:
    """The activities and ranks, with their hosts, that the log names as slow."""
    found = re.findall(r"^(\w+) .*takes longer on (.*?) than on", output, flags=re.MULTILINE)
    return {f"{activity}: {re.sub(r' [(].*?[)]', '', ranks)}" for activity, ranks in found}


def test_ranks_that_sleep_in_forward_and_in_data_are_named(tmp_path):
    faults = [sleeping(1, FORWARD, 0.06), sleeping(2, DATA, 0.06)]
    run = Bench(tmp_path).train_well(ranks=4, faults=faults, **OPTIONS)

    host = socket.gethostname()
    assert named(run.output) == {f"Computing: rank 1 on {host}", f"Waiting: rank 2 on {host}"}
    records = [line for line in run.lines if "loss" in line]
    for line in records:
        assert (line["compute_slowest_rank"], line["data_slowest_rank"]) == (1, 2)
        assert line["compute_ms_slowest"] >= 60 > line["compute_ms_median"] > 0
        assert line["data_ms_slowest"] >= 60 > line["data_ms_median"] >= 0
    lines = (run.folder / "log.txt").read_text(encoding="utf-8")
    assert not re.search(r"(compute|data)[_ ]ms", lines)  # in metrics.jsonl only


@pytest.mark.extended
def test_a_rank_that_sleeps_in_saving_is_named(tmp_path):
    saves = {"checkpointing_steps": 1, "logging_steps": 1, "max_train_steps": 3}
    saves["data_parallel_shard_size"] = 4  # so that every rank writes a part
    faults = [sleeping(3, SAVE, 1.2)]
    run = Bench(tmp_path).train_well(ranks=4, faults=faults, **OPTIONS | saves)

    assert named(run.output) == {f"Writing: rank 3 on {socket.gethostname()}"}
    [event] = [line for line in run.events if line["event"] == "slow"]
    assert event["activity"] == "save"
    [*_, last] = [line for line in run.lines if "loss" in line]
    # The first save has ended by the third step, because the second one waits for it.
    assert last["save_slowest_rank"] == 3
    assert last["save_ms_slowest"] >= 1200 > last["save_ms_median"] > 0


@pytest.mark.extended
@pytest.mark.parametrize(
    "options",
    [
        {"gradient_accumulation_steps": 3},
        {"data_parallel": "gossip"},
        {"data_parallel_shard_size": 2},
    ],
)
def test_a_layout_names_the_rank_whose_forward_it_can_time(tmp_path, options):
    faults = [sleeping(1, FORWARD, 0.06)]
    run = Bench(tmp_path).train_well(ranks=2, faults=faults, **OPTIONS, **options)
    # Where weights are sharded, ranks wait for each other in every forward pass.
    is_timed = "data_parallel_shard_size" not in options
    assert ("Computing: rank 1 on" in str(named(run.output))) == is_timed
    assert ("compute_slowest_rank" in run.lines[0]) == is_timed


def test_one_rank_is_compared_with_nobody(tmp_path):
    run = Bench(tmp_path).train_well(faults=[sleeping(0, FORWARD, 0.02)], **OPTIONS)
    assert named(run.output) == set()
    assert not any("slowest" in name for line in run.lines for name in line)
