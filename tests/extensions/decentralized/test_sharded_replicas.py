"""Gossip between nodes that divide their replica over their ranks, as whole runs on 2 x 2 ranks."""

import pytest
import torch
from safetensors.torch import load_file

from llm.checkpoint.load import find_newest_checkpoint
from llm.errors import ConfigError
from llm.trainers.gpt.main import parse_args
from tests.support.faults import Fault
from tests.support.recovery import check_same, kill_and_go_on
from tests.support.training import NO_DROPOUT, Bench, Run, assert_refused

FORWARD = "llm.parallel.base:AcceleratedStrategy.forward_backward"
NODES = {
    "data_parallel": "gossip",
    "gossip_group": "nodes",
    "topology": "exp",
    "ranks": 4,
    "environment": {"LOCAL_WORLD_SIZE": "2"},
    "per_device_train_batch_size": 2,
    "max_train_steps": 10,
    "checkpointing_steps": 5,
    "eval_steps": 4,
    "report_to": "tensorboard",
}
DIVIDED = {**NODES, "data_parallel_shard_size": 2}


@pytest.fixture(scope="module")
def bench(tmp_path_factory) -> Bench:
    return Bench(tmp_path_factory.mktemp("sharded-replicas"), **NO_DROPOUT)


@pytest.fixture(scope="module")
def whole(bench) -> Run:
    """Each rank holds all that its node trains, and their gradients are averaged."""
    return bench.train_well("whole", **NODES)


@pytest.fixture(scope="module")
def divided(bench) -> Run:
    return bench.train_well("divided", **DIVIDED)


def check_alike(run: Run, reference: Run) -> None:
    """The same curves and the same model, but for the order of sums."""
    assert run.losses == pytest.approx(reference.losses, rel=1e-5)
    for name in ("grad_norm", "eval_loss", "eval_consensus_distance"):
        own, wanted = ([m[name] for m in r.metrics if name in m] for r in (run, reference))
        assert wanted
        assert own == pytest.approx(wanted, rel=1e-3 if "distance" in name else 1e-5)
    own, wanted = (load_file(r.folder / "model.safetensors") for r in (run, reference))
    assert own.keys() == wanted.keys()
    for name, tensor in wanted.items():
        torch.testing.assert_close(own[name], tensor, rtol=0, atol=2e-5)


@pytest.mark.extended
def test_sharded_replicas_train_as_whole_ones(divided, whole):
    check_alike(divided, whole)


@pytest.mark.layouts
def test_blocking_exchanges_of_sharded_replicas_train_as_whole_ones(bench):
    blocking = {"gossip_order": "blocking", "max_train_steps": 5}
    whole = bench.train_well("blocking-whole", **{**NODES, **blocking})
    divided = bench.train_well("blocking-divided", **{**DIVIDED, **blocking})
    check_alike(divided, whole)


def test_each_shard_is_saved_once(divided, whole):
    sizes = []
    for run in (divided, whole):
        newest = find_newest_checkpoint(run.folder / "checkpoints")
        assert newest is not None
        assert newest.metadata["replicas"] == 2
        sizes.append(sum(size for name, (size, _) in newest.files.items() if "safetensors" in name))
    # The mean, and two replicas with two moments and a sum each.
    assert sizes[0] == pytest.approx(sizes[1], rel=0.1)


@pytest.mark.faults
def test_a_killed_run_resumes_bit_for_bit(bench, divided):
    kill = Fault(at=FORWARD, what="SIGKILL", call=8, rank=3)
    check_same(kill_and_go_on(bench, "killed", [kill], together=True, **DIVIDED), divided)


@pytest.mark.layouts
@pytest.mark.parametrize(
    ("first", "then"), [(DIVIDED, NODES), (NODES, DIVIDED)], ids=["to whole", "to divided"]
)
def test_a_checkpoint_does_not_depend_on_whether_replicas_are_sharded(bench, whole, first, then):
    name = f"moved-{first.get('data_parallel_shard_size', 1)}"
    ask = Fault(at=FORWARD, what="SIGTERM", call=5, rank=0)
    stopped = bench.train(name, faults=[ask], **first)
    assert stopped.codes == [75] * 4, stopped.output

    run = bench.train_well(name, resume_from_checkpoint=True, **then)

    check_alike(run, whole)


@pytest.mark.layouts
def test_another_number_of_nodes_resumes_from_the_mean(bench, divided):
    ask = Fault(at=FORWARD, what="SIGTERM", call=5, rank=0)
    stopped = bench.train("shrinks", faults=[ask], **DIVIDED)
    assert stopped.codes == [75] * 4, stopped.output
    one_node = {**DIVIDED, "ranks": 2, "resume_from_checkpoint": True}

    run = bench.train_well("shrinks", **one_node)

    assert "holds 2 replicas of the model and this run has 1" in run.output
    assert run.losses[-1] == pytest.approx(divided.losses[-1], rel=0.05)


def test_shard_sizes_other_than_the_node_size_are_refused(bench):
    words = ["over all ranks of a node", "2 on each", "the 4 of --data_parallel_shard_size"]
    assert_refused(bench, words=words, **{**DIVIDED, "data_parallel_shard_size": 4})
    single = {k: v for k, v in DIVIDED.items() if k not in ("gossip_group", "ranks", "environment")}
    with pytest.raises(ConfigError, match=r"goes together with .* --gossip_group nodes"):
        parse_args(bench.command("single", **single))
