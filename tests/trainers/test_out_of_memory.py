"""A device that is too small for a run: one sentence that names the options that help."""

import pytest

from llm.errors import DeviceMemoryError
from llm.runtime.world import World
from llm.trainers.gpt.extensions import GPTConfig
from llm.trainers.gpt.out_of_memory import explain_out_of_memory
from tests.support.faults import Fault
from tests.support.training import Bench

STEP = "llm.parallel.base:AcceleratedStrategy.forward_backward"
START = "llm.trainers.gpt.build_run:make_accelerator"


@pytest.fixture(scope="module")
def bench(tmp_path_factory) -> Bench:
    return Bench(tmp_path_factory.mktemp("bench"))


@pytest.mark.parametrize("at", [START, STEP], ids=["start", "step"])
def test_out_of_memory_is_one_sentence_with_the_remedies(bench, at):
    fault = Fault(at=at, what="out of memory")

    run = bench.train("all", ranks=2, faults=[fault], overwrite_output_dir=True)

    assert run.codes == [2, 2]
    assert "Traceback" not in run.output
    assert run.outcomes[0].output.count("error: Out of memory on cpu of its ") == 1
    for part in (
        "lower --per_device_train_batch_size 4, or ",
        "recompute activations by --activation_checkpointing full, or shard the model",
        "`llm-trainers plan` with the options of this run and --nodes 1 --gpus_per_node 2 --mem",
    ):
        assert part in run.outcomes[0].output
    if at == STEP:
        status = run.read_json("status.json")
        assert status["status"] == "failed"
        assert status["reason"].startswith("DeviceMemoryError: Out of memory on cpu")


def test_out_of_memory_on_one_rank_ends_the_others_too(bench):
    fault = Fault(at=STEP, what="out of memory", call=3, rank=1)

    run = bench.train("one", ranks=2, faults=[fault])

    assert run.codes == [76, 2]
    assert "Traceback" not in run.output
    assert "error: Out of memory on cpu" in run.outcomes[1].output
    assert "error: rank 1 on " in run.outcomes[0].output


def test_out_of_memory_names_no_option_that_is_set_already():
    config = GPTConfig(
        per_device_train_batch_size=1,
        per_device_eval_batch_size=1,
        activation_checkpointing="full",
        data_parallel="gossip",
    )
    with (
        pytest.raises(DeviceMemoryError, match=r"\(rank 3\): shard the model over") as raised,
        explain_out_of_memory(config, World(rank=3, local_rank=3, world_size=4)),
    ):
        raise RuntimeError("NCCL error: Cuda failure 2 'out of memory'")
    assert str(raised.value).endswith("--pipeline_parallel_size.")


def test_other_errors_are_not_explained_as_out_of_memory():
    world = World(rank=0, local_rank=0, world_size=1)
    with pytest.raises(RuntimeError, match="shapes"), explain_out_of_memory(GPTConfig(), world):
        raise RuntimeError("the shapes differ")
