"""What the kernels of a block save in the code generated for a GPU, and the timing of them."""

import importlib.util
import json

import pytest

from benchmarks.generated import SHAPES, VARIANTS, count_block, megabytes
from benchmarks.levers import LeversOptions, report

pytestmark = pytest.mark.benchmarks


@pytest.mark.skipif(
    importlib.util.find_spec("triton") is None,
    reason="needs Triton, which comes with CUDA builds and with the extra `dev`",
)
@pytest.mark.parametrize(
    ("model", "forward", "backward"),
    [
        # With PyTorch 2.13, forward 2157, 2157, 2258, and backward 5187, 4337, 3625. The smallest
        # saving of one kernel is 100 MB.
        ("gpt2", (2200, 2200, 2300), (5250, 4400, 3690)),
        # Forward 2313, 2313, 2380, and backward 3876, 3612, 3005.
        ("llama", (2400, 2400, 2450), (3940, 3670, 3070)),
    ],
)
def test_each_lever_saves_bytes_in_the_generated_code(model, forward, backward):
    counts = []
    for variant in VARIANTS:
        kernels = count_block(SHAPES[model], variant)
        # Forward: projections of q, k, v (Llama: one each), attention, output, and the MLP's.
        assert sum(kernel.is_library for kernel in kernels if not kernel.is_backward) >= 5
        counts.append([megabytes(kernels, is_backward=is_backward) for is_backward in (0, 1)])
    for (forward_count, backward_count), *limits in zip(counts, forward, backward, strict=True):
        assert forward_count <= limits[0]
        assert backward_count <= limits[1]


def test_the_projects_kernels_fit_the_registers_and_the_memory_of_a_gpu():
    pytest.importorskip("triton", reason="comes with CUDA builds and with the extra `dev`")
    from benchmarks.compiled_kernels import (
        MAX_SHARED_BYTES,
        PTXAS,
        compile_launches,
        launches,
        norm_launch,
    )
    from llm.models.backward_kernels import MAX_NORM_WIDTH

    if not PTXAS.exists():
        pytest.skip("this build of Triton has no assembler")
    kernels = [kernel for _, launch in launches() for kernel in compile_launches(launch)]
    names = {"_norm_backward_rows", "_write_and_sum_tiles", "_softmax_rows"}
    assert {kernel.name for kernel in kernels} == names
    (widest,) = compile_launches(norm_launch(8192, MAX_NORM_WIDTH, has_means=True))
    for kernel in (*kernels, widest):
        assert kernel.shared_bytes <= MAX_SHARED_BYTES
        assert kernel.registers * 32 * kernel.num_warps <= 65536  # or it does not start
    assert sum(kernel.spilled_bytes for kernel in kernels) == 0
    # 56 with Triton 3.7; twice the width spills 2,560.
    assert widest.spilled_bytes <= 100


def test_levers_are_rehearsed_on_a_cpu(tmp_path):
    rows, output = tmp_path / "rows.jsonl", tmp_path / "levers.md"
    text = report(
        LeversOptions(device="cpu", repeats=1, rows=str(rows), output=str(output)), tmp_path
    )
    assert output.read_text() == text  # of the last comparison; the time may end before the next
    assert "Not measured: the kernel needs a GPU." in text
    parsed = [json.loads(line) for line in rows.read_text().splitlines()]
    assert [row["kernel"] for row in parsed] == ["torch's operations", *VARIANTS, *VARIANTS]
    assert all(row["ms"] > 0 and row["distance"] == 0 for row in parsed)
