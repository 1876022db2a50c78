"""The largest micro-batch that fits, for `--per_device_train_batch_size auto`."""

import bisect
import dataclasses

from llm.data.batch_plan import micro_batch_sizes
from llm.errors import ConfigError
from llm.parallel.dims import parallel_dims
from llm.tools.plan.estimate import estimate
from llm.tools.plan.job import Job
from llm.tools.plan.options import PlanOptions


def fit_batch_size(options: PlanOptions) -> PlanOptions:
    """Return the options with the largest micro-batch that fits; 1 if none does.

    Raises:
        ConfigError: The run cannot be planned with a micro-batch of one sample.
    """
    dims = parallel_dims(options, options.nodes * options.gpus_per_node)
    sizes = micro_batch_sizes(options, world_size=dims.data_ranks)

    def with_batch_size(size: int) -> PlanOptions:
        return dataclasses.replace(options, per_device_train_batch_size=size)

    def is_too_large(size: int) -> bool:
        try:
            job = Job(with_batch_size(size))
            return not estimate(job, job.dims).fits
        except ConfigError:  # fewer micro-batches than the pipeline needs
            return True

    # The next larger size does not fit, and neither does any above it.
    num_fitting = bisect.bisect_left(sizes, True, key=is_too_large)
    return with_batch_size(sizes[max(0, num_fitting - 1)])
