"""The largest micro-batch that fits, for `--per_device_train_batch_size auto`."""

import bisect
import dataclasses
from functools import partial

from llm.data.batch_plan import list_micro_batch_sizes
from llm.errors import ConfigError
from llm.parallel.dims import make_parallel_dims
from llm.tools.plan.estimate import estimate
from llm.tools.plan.job import Job
from llm.tools.plan.options import PlanOptions


def fit_batch_size(options: PlanOptions) -> PlanOptions:
    """Return the options with the largest micro-batch that fits; 1 if none does.

    Raises:
        ConfigError: The run cannot be planned with a micro-batch of one sample.
    """
    dims = make_parallel_dims(options, options.nodes * options.gpus_per_node)
    sizes = list_micro_batch_sizes(options, world_size=dims.data_ranks)

    # The next larger size does not fit, and neither does any above it.
    num_fitting = bisect.bisect_left(sizes, True, key=partial(_is_too_large, options))
    return _with_micro_batch(options, sizes[max(0, num_fitting - 1)])


def _with_micro_batch(options: PlanOptions, size: int) -> PlanOptions:
    """Return the options with a micro-batch of a number of samples."""
    return dataclasses.replace(options, per_device_train_batch_size=size)


def _is_too_large(options: PlanOptions, size: int) -> bool:
    """Return whether a micro-batch of a number of samples does not fit."""
    try:
        job = Job(_with_micro_batch(options, size))
        return not estimate(job, job.dims).fits
    except ConfigError:  # fewer micro-batches than the pipeline needs
        return True
