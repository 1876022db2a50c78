"""Beside Decent-DP, if it is installed (`pip install --no-deps decent-dp loguru`)."""

import pytest
import torch
import torch.distributed as dist

from llm.extensions.decentralized.accum_adamw import AccumAdamW
from llm.extensions.decentralized.averaging import GossipAverager
from llm.extensions.decentralized.modes import Gossip
from llm.extensions.decentralized.rounds import make_rounds
from tests.support.decentralized import BATCH, Loss, step_data, trained
from tests.support.ranks import run_ranks, values

pytest.importorskip("decent_dp.ddp")

NAMES = {"complete": "complete", "exp": "one-peer-exp", "ring": "ring"}
STEPS = 8


def losses_and_data(rank: int, ranks: int):
    loss = Loss(unused=False)
    for step in range(STEPS):
        input_ids, labels = step_data(step)
        yield loss, input_ids.chunk(ranks)[rank], labels.chunk(ranks)[rank]


def theirs(topology: str) -> torch.Tensor:
    from decent_dp.ddp import DecentralizedDataParallel
    from decent_dp.optim import AccumAdamW as TheirAccumAdamW

    dist.init_process_group("gloo")
    wrapped = None
    for loss, ids, wanted in losses_and_data(dist.get_rank(), dist.get_world_size()):
        if wrapped is None:
            wrapped = DecentralizedDataParallel(
                loss,
                lambda named: TheirAccumAdamW(
                    [p for _, p in named], lr=0.03, betas=(0.9, 0.95), accum_iter=3
                ),
                topology=NAMES[topology],
                bucket_size_in_mb=1,
                _local_world_size=1,
            )
        (wrapped(ids, wanted)[0] / wanted.numel()).backward()
    for work in wrapped._comm_ops:
        work.wait()
    dist.barrier()
    return trained(loss.model)


def ours(topology: str) -> torch.Tensor:
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    period = make_rounds(topology, num_ranks=ranks)
    # Theirs begins with its second round and passes over its third.
    numbers = [1, *range(3, STEPS + 2)]
    rounds = [period[number % len(period)] for number in numbers]
    averager = None
    for loss, ids, wanted in losses_and_data(rank, ranks):
        if averager is None:
            weights = [p for p in loss.parameters() if p.requires_grad]
            optimizer = AccumAdamW(
                weights, lr=0.03, betas=(0.9, 0.95), weight_decay=0.0, accum_steps=3
            )
            averager = GossipAverager(Gossip(rounds=rounds), weights, rank=rank)
        optimizer.zero_grad()
        (loss(ids, wanted)[0] / wanted.numel()).backward()
        averager.before_step()
        optimizer.step()
        averager.after_step()
    averager.wait_for_messages()
    dist.barrier()
    return trained(loss.model)


@pytest.mark.parametrize("topology", list(NAMES))
def test_gossip_takes_the_steps_that_decent_dp_takes(topology):
    assert BATCH % 4 == 0
    found = values(run_ranks(ours, 4, topology))
    expected = values(run_ranks(theirs, 4, topology))
    torch.testing.assert_close(torch.stack(found), torch.stack(expected), rtol=0, atol=1e-10)
    assert (found[0] - found[1]).abs().max() > 1e-3


@pytest.mark.parametrize(
    ("name", "their_name"), [*NAMES.items(), ("alternating-exp-ring", "alternating-exp-ring")]
)
@pytest.mark.parametrize(("ranks", "ranks_per_node"), [(4, 2), (8, 2), (32, 4)])
def test_rounds_are_those_of_decent_dp(name, their_name, ranks, ranks_per_node):
    from decent_dp.topo import TopologyReg

    # Its constructor makes process groups, which the rounds do not need.
    topology = object.__new__(TopologyReg.registry[their_name])
    topology._world_size, topology._local_world_size = ranks, ranks_per_node
    topology._n_nodes = ranks // ranks_per_node
    theirs = [
        sorted(tuple(sorted(edge.ranks)) for edge in edges) for edges in topology._get_topo_edges()
    ]
    rounds = make_rounds(name, num_ranks=ranks, ranks_per_node=ranks_per_node)
    assert [sorted(groups) for groups in rounds] == theirs
