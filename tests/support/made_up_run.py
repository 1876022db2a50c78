"""Steps, an evaluation and a save's copies by the trainer's own strategies, on a made-up device.

Only one of the ranks exists. Call `run` and `launches_of_updates` in processes of their own.
"""

import contextlib
import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed import distributed_c10d
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils import _foreach_utils
from torch.utils._python_dispatch import _disable_current_modes

from llm.checkpoint import snapshot
from llm.checkpoint.options import CheckpointOptions
from llm.checkpoint.save import Saver
from llm.data.corpus import Corpus
from llm.data.loader import MicroBatch
from llm.extensions.norms.norm_records import NormRecords
from llm.metrics.meter import Meter
from llm.metrics.rank_times import ComputeClock
from llm.models.configuration import load_config
from llm.parallel import base, context
from llm.parallel.base import AcceleratedStrategy
from llm.parallel.dims import make_parallel_dims
from llm.runtime.world import World
from llm.trainers.gpt import build_run
from llm.trainers.gpt.extensions import GPTConfig
from llm.trainers.gpt.run_defaults import choose_loss_chunks
from llm.trainers.gpt.seams import choose_layout, make_extensions
from tests.support import made_up_device
from tests.support.models import VOCAB_SIZE, tiny_config
from tests.support.strict_mode import Notes, Strict

BATCH, LENGTH, MICRO_BATCHES, RANKS_PER_NODE = 2, 16, 2, 2
_LATE = 64
"""A step at which the exact decompositions and short intervals of a run's start are over."""


class NumberedTokens:
    """What a run asks of a tokenizer: its size, and its special tokens, of which there are none."""

    eos_token_id = bos_token_id = pad_token_id = None

    def __len__(self) -> int:
        return VOCAB_SIZE


@dataclass(frozen=True)
class Case:
    """What to run.

    Attributes:
        world_size: Number of ranks.
        options: Of `GPTConfig`.
        rank: The one that runs.
        family: Of `tests.support.models`; None for the model that the options describe.
        shape: Samples of a micro-batch, and tokens of a sample.
    """

    world_size: int
    options: dict[str, Any] = field(default_factory=dict)
    rank: int = 0
    family: str | None = "gpt2"
    shape: tuple[int, int] = (BATCH, LENGTH)


def run(case: Case) -> tuple[dict[str, Notes], set[timedelta]]:
    """Run a case in bf16.

    Returns:
        The notes by phase: "preparation", the two "first steps", in which some things are set up,
        "gradient" and "update" of the third one, "log", "evaluation" and "save", and the "next
        step". Then the time-outs of all process groups that the package has made.
    """
    with _prepared(case) as (strategy, strict, config, timeouts):
        return _train(case, strategy, strict, config), timeouts


@contextlib.contextmanager
def _prepared(
    case: Case,
) -> Iterator[tuple[AcceleratedStrategy, Strict, GPTConfig, set[timedelta]]]:
    """Yield the strategy of a case in bf16, the mode that takes its notes, and the options.

    And the time-outs of the process groups that the package makes.
    """
    # With a rank, Accelerate would join groups that this device does not have.
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        os.environ.pop(name, None)
    if case.world_size > 1:
        os.environ["WORLD_SIZE"] = str(case.world_size)
    os.environ["LOCAL_WORLD_SIZE"] = str(min(RANKS_PER_NODE, case.world_size))
    os.environ["ACCELERATE_TORCH_DEVICE"] = f"{made_up_device.NAME}:0"
    device = made_up_device.install(case.rank, case.world_size)
    timeouts = _note_timeouts()
    config = GPTConfig(mixed_precision="bf16", **case.options)
    with Strict() as strict:
        yield _prepare(case, config, device), strict, config, timeouts


def launches_of_updates(case: Case, steps: int) -> list[Counter[str]]:
    """Return the launches of some consecutive steps, without forward and backward passes.

    Clipping counts, and so do the curvature of K-FAC and the preconditioning by it; what its hooks
    launch in the backward pass does not.
    """
    # So that PyTorch clips by operations on lists, as on a GPU.
    _foreach_utils._foreach_supported_types.append(FakeTensor)
    with _prepared(case) as (strategy, strict, config, _):
        tokens = torch.zeros(case.shape, dtype=torch.long, device=strategy.device)
        batch, counts = MicroBatch(tokens, tokens), []
        kfac = getattr(strategy.run_optimizer, "recorder", None)
        if kfac is not None:
            kfac.steps = _LATE
        for state in strategy.optimizer.state.values():
            for key, tensor in state.items():
                if key.endswith("calls"):
                    tensor.fill_(_LATE)
        for step in range(steps):
            strategy.set_learning_rate(1e-3)
            if step == 0 or kfac is not None:  # else the gradients stay
                strategy.forward_backward([batch], num_tokens=tokens.numel())
            strict.take_notes()
            strategy.optimizer_step(config.max_grad_norm)
            counts.append(strict.take_notes().launches)
        return counts


def notes_of_a_record(case: Case) -> Notes:
    """Return the notes of all that `--log_norms` adds to a step, on one rank."""
    with _prepared(case) as (strategy, strict, _, _):
        tokens = torch.zeros(case.shape, dtype=torch.long, device=strategy.device)
        batch: Any = SimpleNamespace(micro_batches=[MicroBatch(tokens, tokens)])
        records = NormRecords(strategy, interval_steps=1, has_several_models=False)
        records.before_step(0)
        strategy.forward_backward(batch.micro_batches, num_tokens=tokens.numel())
        strict.take_notes()
        records._measure_gradients()
        records.after_step(1, batch)
        return strict.take_notes()


def _prepare(case: Case, config: GPTConfig, device: torch.device) -> AcceleratedStrategy:
    """Make the strategy as the trainer does, but for what this device cannot do."""
    make_accelerator = build_run.make_accelerator

    def join(*args: Any, **kwargs: Any) -> Any:
        """Accelerate knows no process groups of this device: let it take them for those of GPUs."""
        accelerator = make_accelerator(*args, **kwargs)
        if case.world_size > 1:
            for state in (PartialState, AcceleratorState):
                state._shared_state["num_processes"] = case.world_size
                state._shared_state["process_index"] = case.rank
                state._shared_state["distributed_type"] = DistributedType.MULTI_GPU
        return accelerator

    build_run.device_of, build_run.make_accelerator = lambda _: device, join
    # Both compare values.
    build_run.check_causal = build_run._check_model = lambda *_, **__: None
    snapshot._ASYNC_COPY_DEVICES = {made_up_device.NAME}
    snapshot._allocate_buffers = _allocate_buffers
    Saver._save_snapshot = lambda *_: None  # its messages are lost
    context.causal_lower_right = _outside_modes(context.causal_lower_right)
    # PyTorch 2.10 computes the shapes of a DTensor with tensors of the host, which are real here.
    shapes = ShardingPropagator._propagate_tensor_meta_non_cached
    ShardingPropagator._propagate_tensor_meta_non_cached = _outside_modes(shapes)
    run: Any = SimpleNamespace(
        config=config,
        world=World(rank=case.rank, local_rank=0, world_size=case.world_size),
        seed=1,
        tokenizer=NumberedTokens(),
        model_config=tiny_config(case.family) if case.family else load_config(config),
        weights_from=None,
        start=None,
        block_size=case.shape[1],
        document_boundaries=None,
        corpus=Corpus(train=(), validation=()),
        loss_chunks=choose_loss_chunks(config, None, device),
        dims=make_parallel_dims(config, case.world_size),
        extensions=make_extensions(config),
        layout=choose_layout(
            config,
            make_extensions(config),
            ranks=case.world_size,
            ranks_per_node=min(RANKS_PER_NODE, case.world_size),
            start=None,
        ),
    )
    model = build_run.make_model(run)
    made_up_device.cast_as_on_cuda()
    order_gradient_buckets = base.order_gradient_buckets

    def answer_and_order(loss: torch.nn.Module, device: torch.device) -> None:
        made_up_device.answer_all_reduces(loss)
        order_gradient_buckets(loss, device)

    base.order_gradient_buckets = answer_and_order
    strategy, _ = build_run.make_strategy(run, model)
    if case.world_size > 1 and not strategy.communicates_in_forward:
        strategy.compute_clock = ComputeClock(device)
    return strategy


def _train(
    case: Case, strategy: AcceleratedStrategy, strict: Strict, config: GPTConfig
) -> dict[str, Notes]:
    """Do what the loop does, without reading the results."""
    notes = {"preparation": strict.take_notes()}
    tokens = torch.zeros(case.shape, dtype=torch.long, device=strategy.device)
    batch = MicroBatch(tokens, tokens)
    num_tokens = MICRO_BATCHES * tokens.numel() * strategy.data_ranks
    meter = Meter(strategy.device, rank=strategy.rank)
    saver = Saver(
        CheckpointOptions(),
        Path("checkpoints"),
        parts={"strategy": strategy, **strategy.run_optimizer.parts()},
        metadata={},
        rank=strategy.rank,
        world_size=strategy.world_size,
        owner_ranks=strategy.owner_ranks,
        blocking_paths=strategy.copied_first(),
    )

    def take_step(step: int) -> Notes:
        strategy.set_learning_rate(1e-3)
        loss_sum = strategy.forward_backward([batch] * MICRO_BATCHES, num_tokens=num_tokens)
        gradient = strict.take_notes() if step == 2 else Notes()
        saver.before_update()
        norm, skipped = strategy.optimizer_step(config.max_grad_norm)
        meter.add(step, loss_sum, num_tokens, grad_norm=norm, skipped=skipped)
        strategy.reduce_flags([False, False])
        return gradient

    for step in range(2):
        take_step(step)
    notes["first steps"] = strict.take_notes()
    notes["gradient"] = take_step(2)
    notes["update"] = strict.take_notes()
    meter.all_reduce(strategy.reduce_sum)
    notes["log"] = strict.take_notes()
    with strategy.averaged():
        loss_sum, counted = strategy.evaluate(batch)
        strategy.reduce_sum(torch.stack([loss_sum, counted.float()]))
    notes["evaluation"] = strict.take_notes()
    saver.save(step=3, eval_loss=None)
    notes["save"] = strict.take_notes()
    take_step(3)
    notes["next step"] = strict.take_notes()
    return notes


def _allocate_buffers(tensors: dict[str, torch.Tensor], *, pinned: bool) -> dict[str, torch.Tensor]:
    """Return memory of the host for a copy of each tensor: this device cannot pin any."""
    assert pinned
    return {path: torch.empty(tensor.shape, dtype=tensor.dtype) for path, tensor in tensors.items()}


def _note_timeouts() -> set[timedelta]:
    """Return the time-outs of process groups that are made from now on."""
    timeouts: set[timedelta] = set()
    make = distributed_c10d._new_process_group_helper

    def noted(*args: Any, timeout: timedelta, **kwargs: Any) -> Any:
        timeouts.add(timeout)
        return make(*args, timeout=timeout, **kwargs)

    distributed_c10d._new_process_group_helper = noted
    return timeouts


def _outside_modes(make: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that no mode sees: PyTorch cannot make its `CausalBias` within one."""

    def made(*args: Any) -> Any:
        with _disable_current_modes():
            return make(*args)

    return made


def main(options: dict[str, Any], steps: int) -> None:
    """Print the number of launches of each step, for a model that the options describe."""
    case = Case(1, options, family=None, shape=(1, 16))
    print(json.dumps([count.total() for count in launches_of_updates(case, steps)]))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), int(sys.argv[2]))
