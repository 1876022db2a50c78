"""Flags that one rank sets reach all, once, at the same call."""

import pytest
import torch.distributed as dist

from llm.extensions.decentralized.any_rank import FlagReducer
from tests.support.ranks import run_ranks, values

CALLS = 24


def answers(asking: int) -> tuple[int, list[list[int]]]:
    """For each call at which a rank asks for the second flag: at which calls it was answered."""
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    heard = []
    for asked_at in range(4):
        votes = FlagReducer(rank=rank, world_size=world_size)
        said = [
            votes.reduce_flags([False, rank == asking and call == asked_at])
            for call in range(CALLS)
        ]
        assert not any(first for first, _ in said)
        heard.append([call for call, (_, second) in enumerate(said) if second])
        votes.wait_for_messages()
    dist.barrier()
    return votes.delay, heard


@pytest.mark.parametrize(
    ("ranks", "heard"),
    [
        (2, [[1], [2], [3], [4]]),  # a turn each: the answer comes with the next call
        (3, [[2], [4], [4], [6]]),  # two turns; a flag waits for the vote under way
        pytest.param(4, [[2], [4], [4], [6]], marks=pytest.mark.extended),
    ],
)
def test_all_ranks_receive_a_flag_once_at_the_same_call(ranks, heard):
    for delay, found in values(run_ranks(answers, ranks, ranks - 1)):
        assert found == heard
        assert delay == max(calls[0] - asked for asked, calls in enumerate(found))
