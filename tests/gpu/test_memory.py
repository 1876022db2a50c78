"""The peak of the GPU's memory that a run reports, against the plan of the same run.

On a CPU a run reports its resident memory; there `tests/tools/test_plan_measured.py` counts
tensors.
"""

from pathlib import Path
from typing import Any

import pytest

from llm.metrics.hardware import device_memory
from llm.tools.plan.estimate import estimate
from llm.tools.plan.job import GIB, Job
from llm.tools.plan.memory import CONTEXT
from llm.tools.plan.options import PlanOptions
from tests.gpu.device import DEVICE, GPUBench, gpu, only_on_a_gpu

pytestmark = [*gpu, only_on_a_gpu]

SIZES = {"num_layers": 8, "hidden_size": 1024, "num_attention_heads": 16}


def planned(model: Path, **options: Any) -> int:
    """Bytes of tensors at the highest moment of a step."""
    memory = device_memory(DEVICE)
    assert memory is not None
    job = Job(
        PlanOptions(
            model_name_or_path=str(model),
            gpus_per_node=1,
            memory_gib=memory / GIB,
            **SIZES,
            **options,
        )
    )
    return estimate(job, job.dims).memory.total - CONTEXT


@pytest.mark.parametrize(
    "options",
    [
        {"mixed_precision": "bf16", "torch_compile": False},
        {"mixed_precision": "bf16", "torch_compile": True},
        {"mixed_precision": "no", "torch_compile": False},
        {"mixed_precision": "bf16", "gradient_accumulation_steps": 2},
        {"mixed_precision": "bf16", "activation_checkpointing": "full"},
        {"mixed_precision": "bf16", "activation_checkpointing": "selective"},
        {"mixed_precision": "bf16", "kfac": True},
        {"mixed_precision": "bf16", "optimizer": "muon"},
    ],
    ids=str,
)
def test_the_plan_is_within_a_tenth_of_the_measured_peak(tmp_path, options):
    bench = GPUBench(tmp_path, n_positions=1024, vocab_size=50257, lines=4000)
    options = {"block_size": 1024, "per_device_train_batch_size": 8, **options}
    run = bench.train_well(timeout=600, max_train_steps=4, **SIZES, **options)
    peak = max(record["memory"] for record in run.metrics if "loss" in record)
    assert planned(bench.model, **options) == pytest.approx(peak, rel=0.1)
