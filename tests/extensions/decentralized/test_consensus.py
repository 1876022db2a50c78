"""The mean of replicas against its formula, and the memory that it takes."""

import pytest
import torch
import torch.distributed as dist

from llm.extensions.decentralized.consensus import Consensus
from llm.parallel import flat_buffers
from llm.tools.plan.trace import MemoryMeter
from tests.support.ranks import run_ranks, values

NUM_TENSORS, NUMEL = 20, 1000
COPY = 4 * NUM_TENSORS * NUMEL


def weights_of(rank: int) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(rank)
    return [torch.randn(NUMEL, generator=draw) for _ in range(NUM_TENSORS)]


def mean_and_peak(how: str, buffer_bytes: int) -> tuple[torch.Tensor, float, int]:
    """The mean weights, the distance, and the most bytes beside the weights themselves."""
    dist.init_process_group("gloo")
    flat_buffers.MAX_BUFFER_BYTES = buffer_bytes
    weights = weights_of(dist.get_rank())
    consensus = Consensus(weights, world_size=dist.get_world_size())
    with MemoryMeter(existing=weights) as meter:
        if how == "saved":
            means = consensus.mean()
        else:
            with consensus.averaged():
                means = [weight.clone() for weight in weights]
        peak = meter.mark().peak
    dist.barrier()
    return torch.cat(means), float(consensus.distance), peak - (COPY if how == "evaluated" else 0)


@pytest.mark.parametrize("how", ["saved", pytest.param("evaluated", marks=pytest.mark.extended)])
def test_the_mean_takes_one_copy_of_the_weights_and_one_buffer(how):
    small, large = (
        values(run_ranks(mean_and_peak, 2, how, bytes_)) for bytes_ in (8 * NUMEL, 2 * COPY)
    )
    expected = (torch.cat(weights_of(0)) + torch.cat(weights_of(1))) / 2
    for mean, distance, peak in small:
        assert torch.equal(mean, small[0][0])
        torch.testing.assert_close(mean, expected)
        # The buffer holds two tensors, and the distance takes a few of a tensor's size.
        assert peak <= COPY + 8 * NUMEL + 24 * NUMEL
        assert distance == large[0][1]
    assert torch.equal(small[0][0], large[0][0])
