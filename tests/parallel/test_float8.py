"""Weights gathered in float8 are those that one rank casts, in half the bytes of bf16.

A CPU has no float8 products, so the trainer refuses them there. Here torchao computes them in
float32, from values in float8. Each block of the model has biases: gloo cannot send float8, but
sends bytes, which PyTorch makes of weights in several precisions.
"""

import functools
from collections import Counter

import pytest
import torch

from llm.checkpoint.load import find_newest_checkpoint, load_state
from llm.checkpoint.options import CheckpointOptions
from llm.checkpoint.save import Saver
from llm.data.loader import MicroBatch
from llm.models.attention import disable_packing_detection
from llm.models.compilation import compile_blocks
from llm.models.loss import LanguageModelLoss
from llm.models.options import ModelOptions
from llm.optim.run_optimizer import OptimizerFactory
from llm.parallel.base import AcceleratedStrategy
from llm.parallel.fsdp import ShardedStrategy
from llm.parallel.options import ParallelOptions
from llm.parallel.sharded_init import fill_model
from tests.support.layouts import cpu_accelerator, dims_of, make_optimizer
from tests.support.models import tiny_config, tiny_model
from tests.support.operations import Messages
from tests.support.ranks import run_ranks, values

pytest.importorskip("torchao", reason="float8 layers need torchao")

BATCH, LENGTH, STEPS = 8, 16, 4
CPU, META = torch.device("cpu"), torch.device("meta")
MORE = pytest.mark.layouts


def emulated_accelerator():
    """An accelerator for float8 on a CPU."""
    import torchao.float8

    convert = torchao.float8.Float8LinearConfig
    torchao.float8.Float8LinearConfig = functools.partial(convert, emulate=True)
    accelerator = cpu_accelerator("bf16")
    accelerator.state._mixed_precision = "fp8"
    # torchao asks for the autocast of GPUs, whatever the device.
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", torch.bfloat16)
    return accelerator


def start(shard: int, *, fp8_all_gather: bool = True, recompute: bool = False, compiled=False):
    """A strategy of ranks that share the weights, which have started on the meta device."""
    disable_packing_detection()
    accelerator = emulated_accelerator()
    model = tiny_model(
        tiny_config("qwen2", attention_dropout=0.0), device=CPU if shard == 1 else META
    )
    strategy = AcceleratedStrategy(accelerator)
    if shard > 1:
        init_weights = functools.partial(fill_model, ModelOptions(), seed=1, device=CPU)
        sends = ParallelOptions(fp8_all_gather=fp8_all_gather)
        dims = dims_of(shard=shard)
        strategy = ShardedStrategy(sends, accelerator, dims, init_weights=init_weights)
    if recompute:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if compiled:
        torch.compile = functools.partial(torch.compile, backend="eager")
        compile_blocks(model)
    strategy.prepare(LanguageModelLoss(model), OptimizerFactory(make_optimizer).make)
    return strategy


def train_step(strategy, step: int, micro_batches: int) -> list[float]:
    """Take a step, and evaluate: the same micro-batches, on one rank or on several."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(320, (BATCH, LENGTH + 1), generator=generator)
    own = tokens.chunk(strategy.data_ranks)[strategy.data_rank].chunk(micro_batches)
    batches = [MicroBatch(part[:, :-1], part[:, 1:]) for part in own]
    loss = strategy.forward_backward(batches, num_tokens=BATCH * LENGTH)
    norm, _ = strategy.optimizer_step(0.5)
    evaluated = sum(strategy.evaluate(batch)[0] for batch in batches)
    sums = strategy.reduce_sum(torch.cat([loss, evaluated.view(1)])) / (BATCH * LENGTH)
    return [*sums.tolist(), norm.item()]


def train(shard: int, micro_batches: int, **options):
    """Losses and norms of some steps, the gathers of the last one, the weights, and the graphs."""
    strategy = start(shard, **options)
    seen = [train_step(strategy, step, micro_batches) for step in range(STEPS - 1)]
    messages = Messages()
    with messages:
        seen.append(train_step(strategy, STEPS - 1, micro_batches))
    gathers = [(dtype, size) for name, dtype, size in messages.sent if name == "gather"]
    graphs = torch._dynamo.utils.counters
    traced = graphs["stats"]["unique_graphs"], dict(graphs["graph_break"])
    return torch.tensor(seen), gathers, strategy.gather_full_state_dict(), traced


@functools.cache
def run(ranks: int, micro_batches: int, **options):
    """What the first of some ranks has seen; each micro-batch has two samples."""
    shard = min(ranks, 2)
    return values(run_ranks(functools.partial(train, shard, micro_batches, **options), ranks))[0]


@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        (2, {}),
        pytest.param(4, {}, marks=MORE),
        pytest.param(2, {"recompute": True}, marks=MORE),
        pytest.param(2, {"compiled": True}, marks=MORE),
    ],
)
def test_ranks_that_gather_float8_train_as_one_rank_does(ranks, options):
    """One rank casts the same float32 weights, with the scale of the whole weight."""
    expected, _, whole, _ = run(1, 4)
    seen, _, weights, (graphs, breaks) = run(ranks, 4 // ranks, **options)
    # Sums in another order rarely round a number to another float8 value.
    torch.testing.assert_close(seen, expected, rtol=1e-3, atol=0)
    assert weights.keys() == whole.keys()
    for name, tensor in weights.items():
        assert type(tensor) is torch.Tensor
        assert (tensor - whole[name]).abs().max() < 1e-2  # of one step
    assert (graphs > 0) == options.get("compiled", False)
    assert breaks == {}


def test_weights_gathered_in_bf16_are_rounded_twice():
    expected, *_ = run(1, 4)
    once, *_ = run(2, 2)
    twice, *_ = run(2, 2, fp8_all_gather=False)
    # bf16 has 8 bits and float8 has 4, so few weights get another float8 value: below half of one
    # percent in the losses after these steps, but more than what the order of sums changes.
    torch.testing.assert_close(twice[:, :2], expected[:, :2], rtol=5e-3, atol=0)
    assert (twice - expected).norm() > 3 * (once - expected).norm()


def test_a_gathered_weight_takes_one_byte_instead_of_two():
    """In bytes, as PyTorch sends several precisions: the biases and one matrix are in bf16."""
    matrices, first, biases = 3 * 32 * 32 + 3 * 32 * 64, 32 * 32, 2 * 32
    _, gathers, *_ = run(2, 2)
    # Two micro-batches forward and backward, and the same in an evaluation.
    assert Counter(gathers) == {
        (torch.uint8, matrices + first + 2 * biases): 6,  # the first layer of the model stays bf16
        (torch.uint8, matrices + 2 * biases): 6,
        (torch.float32, 5 * 32): 1,  # gains
        (torch.float32, 320 * 32): 1,  # the embedding
        (torch.bfloat16, 320 * 32): 1,  # the head
    }
    _, gathers, *_ = run(2, 2, fp8_all_gather=False)
    assert Counter(gathers)[torch.bfloat16, matrices + biases] == 12


def save_and_go_on(folder) -> list[list[float]]:
    strategy = start(2)
    for step in range(2):
        train_step(strategy, step, 1)
    saver_of(folder, strategy).save(step=2, eval_loss=None)
    return rest_of_training(strategy)


def saver_of(folder, strategy) -> Saver:
    return Saver(
        CheckpointOptions(async_checkpoint=False),
        folder,
        parts={"strategy": strategy},
        metadata={},
        rank=strategy.rank,
        world_size=strategy.world_size,
        owner_ranks=strategy.owner_ranks,
    )


def resume(folder) -> list[list[float]]:
    strategy = start(2)
    load_state(find_newest_checkpoint(folder), {"strategy": strategy})
    return rest_of_training(strategy)


def rest_of_training(strategy):
    return [
        train_step(strategy, step, 1) for step in range(2, STEPS)
    ], strategy.gather_full_state_dict()


def test_a_run_resumes_bit_for_bit(tmp_path):
    (losses, weights), _ = values(run_ranks(save_and_go_on, 2, tmp_path))
    (again, same), _ = values(run_ranks(resume, 2, tmp_path))
    assert again == losses
    assert same.keys() == weights.keys()
    for name, tensor in weights.items():
        assert torch.equal(same[name], tensor), name
