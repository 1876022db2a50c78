"""Meters of several ranks in one process."""

import copy

import torch

from llm.metrics.meter import Meter


def all_reduce(*meters: Meter) -> None:
    """Give each meter the sums over all of them, message by message, as the ranks' group does."""
    given: list[list[torch.Tensor]] = [[] for _ in meters]
    for meter, own in zip(meters, given, strict=True):
        copy.deepcopy(meter).all_reduce(lambda values, own=own: own.append(values) or values)
    sums = [torch.stack(messages).sum(dim=0) for messages in zip(*given, strict=True)]
    for meter in meters:
        answers = iter(sums)
        meter.all_reduce(lambda _, answers=answers: next(answers))
