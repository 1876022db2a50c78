"""Layers divided over stages train as the whole model does on one rank."""

import gc
import os
import weakref
from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from llm.data.loader import MicroBatch
from llm.models.attention import disable_packing_detection
from llm.models.loss import LanguageModelLoss
from llm.models.patches.tied_embedding import tie_gradients
from llm.optim.run_optimizer import OptimizerFactory
from tests.support import layouts
from tests.support.layouts import make_optimizer
from tests.support.models import still_model
from tests.support.ranks import run_ranks, values

BATCH, LENGTH, STEPS = 8, 16, 3


def make_model(family: str, layers: int):
    changes = {"num_layers": layers, "attention_types": [[["global", "local"], layers // 2]]}
    if family != "gpt_neo":
        changes = {"num_hidden_layers": layers}
    model = still_model(family, **changes)
    tie_gradients(model)
    return model


def make_strategy(sizes, schedule, virtual_stages, mixed_precision="no"):
    return layouts.make_strategy(
        sizes, mixed_precision, pipeline_schedule=schedule, virtual_stages=virtual_stages
    )


def data_of(step: int):
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(320, (BATCH, LENGTH + 1), generator=generator)
    labels = tokens[:, 1:].clone()
    labels[0, : LENGTH // 2] = -100  # an uneven number of tokens on the ranks
    return tokens[:, :-1], labels


def train(family, layers, sizes, schedule, virtual_stages, accumulation):
    """Losses, norms, an evaluation and final weights of a few steps."""
    model = make_model(family, layers)
    strategy = make_strategy(sizes, schedule, virtual_stages)
    strategy.prepare(LanguageModelLoss(model), OptimizerFactory(make_optimizer).make)
    seen = []
    for step in range(STEPS):
        inputs, labels = data_of(step)
        size = BATCH // (strategy.data_ranks * accumulation)
        micro_batches = []
        for number in range(accumulation):
            first = (number * strategy.data_ranks + strategy.data_rank) * size
            rows = slice(first, first + size)
            micro_batches.append(MicroBatch(inputs[rows], labels[rows]))
        loss = strategy.forward_backward(micro_batches, num_tokens=int((labels != -100).sum()))
        norm, skipped = strategy.optimizer_step(0.5)
        seen.append([strategy.reduce_sum(loss.clone()).item(), norm.item(), skipped.item()])
        if step == 1:
            inputs, labels = data_of(100)
            size = BATCH // strategy.data_ranks
            rows = slice(strategy.data_rank * size, (strategy.data_rank + 1) * size)
            found = torch.stack(strategy.evaluate(MicroBatch(inputs[rows], labels[rows])))
            found_best = strategy.predict(MicroBatch(inputs[rows], labels[rows]))
            best, log_probs = (strategy.gather(values) for values in found_best)
            seen.append([*strategy.reduce_sum(found).tolist(), float(best.sum())])
            seen.append([float(log_probs[row].sum()) for row in (0, 1, -1)])
    return seen, strategy.gather_full_state_dict(), sum(p.numel() for p in strategy.parameters)


def train_all(cases):
    disable_packing_detection()
    return [train(*case) for case in cases]


def assert_trains_as_one_rank(ranks, family, layers, cases):
    expected, whole, size = values(run_ranks(train_all, 1, [(family, layers, {}, "", 1, 1)]))[0][0]
    outcomes = values(run_ranks(train_all, ranks, [(family, layers, *case) for case in cases]))
    for number, case in enumerate(cases):
        for seen, _, held in (outcome[number] for outcome in outcomes):
            torch.testing.assert_close(
                torch.tensor(seen), torch.tensor(expected), rtol=1e-5, atol=0, msg=str(case)
            )
            assert held < 0.9 * size
        weights = outcomes[0][number][1]
        assert weights.keys() == whole.keys()
        for name, tensor in whole.items():
            torch.testing.assert_close(weights[name], tensor, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", ["gpt2", pytest.param("llama", marks=pytest.mark.layouts)])
def test_two_stages_train_as_one_rank(family):
    cases = [
        ({"pipeline": 2}, "gpipe", 1, 1),
        ({"pipeline": 2}, "1f1b", 1, 2),
        ({"pipeline": 2}, "1f1b", 1, 4),
        ({"pipeline": 2}, "interleaved-1f1b", 2, 4),
    ]
    assert_trains_as_one_rank(2, family, 4, cases)


@pytest.mark.layouts
@pytest.mark.parametrize("family", ["gpt_neo", "gpt_neox"])
def test_families_whose_layers_return_other_things_train_as_one_rank(family):
    assert_trains_as_one_rank(2, family, 4, [({"pipeline": 2}, "1f1b", 1, 2)])


@pytest.mark.layouts
def test_four_ranks_train_as_one():
    cases = [
        ({"pipeline": 4}, "gpipe", 1, 2),
        ({"pipeline": 4}, "1f1b", 1, 4),
        ({"pipeline": 2}, "1f1b", 1, 2),
        ({"pipeline": 2, "shard": 2}, "1f1b", 1, 2),
        ({"pipeline": 2, "shard": 2}, "interleaved-1f1b", 2, 2),
        ({"pipeline": 2}, "interleaved-1f1b", 2, 1),
    ]
    assert_trains_as_one_rank(4, "gpt2", 4, cases)


def train_with_documents():
    """Losses and norms where positions and attention start anew, and layers are recomputed."""
    disable_packing_detection()
    model = make_model("llama", 4)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    strategy = make_strategy({"pipeline": int(os.environ["WORLD_SIZE"])}, "1f1b", 1)
    strategy.prepare(LanguageModelLoss(model), OptimizerFactory(make_optimizer).make)
    places = torch.arange(LENGTH).expand(BATCH // 2, LENGTH)
    seen = []
    for step in range(STEPS):
        micro_batches = [
            MicroBatch(inputs, labels, places % 5, places // 5)
            for inputs, labels in zip(*(part.chunk(2) for part in data_of(step)), strict=True)
        ]
        loss = strategy.forward_backward(micro_batches, num_tokens=BATCH * LENGTH)
        norm, _ = strategy.optimizer_step(0.5)
        found, _ = strategy.evaluate(micro_batches[0])
        seen.append([loss.item(), norm.item(), found.item()])
    return seen


def test_documents_stay_apart_and_layers_are_recomputed_on_every_stage():
    expected = values(run_ranks(train_with_documents, 1))[0]
    for seen in values(run_ranks(train_with_documents, 2)):
        torch.testing.assert_close(torch.tensor(seen), torch.tensor(expected), rtol=1e-5, atol=0)


def train_in(precision):
    """Losses and norms of two steps, and what became of a third whose loss is scaled too far."""
    disable_packing_detection()
    model = make_model("gpt2", 2)
    sizes = {"pipeline": int(os.environ["WORLD_SIZE"])}
    strategy = make_strategy(sizes, "gpipe", 1, precision)
    strategy.prepare(LanguageModelLoss(model), OptimizerFactory(make_optimizer).make)
    seen = []
    for step in range(2):
        loss = strategy.forward_backward([MicroBatch(*data_of(step))], num_tokens=120)
        norm, skipped = strategy.optimizer_step(1.0)
        seen.append([loss.item(), norm.item(), skipped.item()])
    if strategy.scaler is None:
        return seen, None
    strategy.scaler.update(3e38)
    before = [parameter.clone() for parameter in strategy.parameters]
    strategy.forward_backward([MicroBatch(*data_of(2))], num_tokens=120)
    _, skipped = strategy.optimizer_step(1.0)
    assert all(map(torch.equal, before, strategy.parameters))
    return seen, (skipped.item(), strategy.loss_scale().item())


@pytest.mark.parametrize("precision", [pytest.param("bf16", marks=pytest.mark.extended), "fp16"])
def test_fp16_trains_alike_and_an_overflow_skips_the_step_on_all_stages(precision):
    expected, overflow = values(run_ranks(train_in, 1, precision))[0]
    assert overflow is None or overflow[0] == 1
    for seen, outcome in values(run_ranks(train_in, 2, precision)):
        torch.testing.assert_close(torch.tensor(seen), torch.tensor(expected), rtol=2e-3, atol=0)
        assert outcome == overflow


class Messages(TorchDispatchMode):
    """Counts collectives, and lists the types of the real numbers that stages send."""

    def __init__(self):
        super().__init__()
        self.counts, self.sent_dtypes = Counter(), set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[func] += 1
        if func is torch.ops.c10d.send.default:
            # One number is the greeting by which PyTorch 2.10 connects two stages.
            sent = (t for t in args[0] if t.is_floating_point() and t.numel() > 1)
            self.sent_dtypes |= {t.dtype for t in sent}
        return func(*args, **(kwargs or {}))


def messages_of(precision):
    """The number of all-reduces in a step, and the types of what stages send in an evaluation."""
    disable_packing_detection()
    strategy = make_strategy({"pipeline": 2}, "1f1b", 1, precision)
    strategy.prepare(
        LanguageModelLoss(make_model("gpt2", 4)), OptimizerFactory(make_optimizer).make
    )
    for _ in range(2):  # in the first step, PyTorch 2.15 also agrees on the shapes
        with Messages() as in_step:
            strategy.forward_backward([MicroBatch(*data_of(0))] * 2, num_tokens=240)
            strategy.optimizer_step(0.5)
    with Messages() as in_evaluation:
        strategy.evaluate(MicroBatch(*data_of(1)))
    all_reduces = in_step.counts[torch.ops.c10d.allreduce_.default]
    return all_reduces, in_step.sent_dtypes | in_evaluation.sent_dtypes


@pytest.mark.parametrize(
    ("ranks", "all_reduces"), [(2, 3), pytest.param(4, 4, marks=pytest.mark.layouts)]
)
def test_a_step_all_reduces_the_gradients_of_each_group_at_once(ranks, all_reduces):
    # Those of the tied weight, and of replicas if there are any; the loss; the norm.
    assert {count for count, _ in values(run_ranks(messages_of, ranks, "no"))} == {all_reduces}


@pytest.mark.parametrize(
    ("precision", "dtype"),
    [
        pytest.param("no", torch.float32, marks=pytest.mark.extended),
        ("bf16", torch.bfloat16),
        pytest.param("fp16", torch.float32, marks=pytest.mark.extended),
    ],
)
def test_stages_exchange_hidden_states_and_gradients_in_bf16(precision, dtype):
    # In fp16, in which hidden states could overflow, they stay float32.
    for _, sent in values(run_ranks(messages_of, 2, precision)):
        assert sent == {dtype}


def hold():
    """How many numbers of the model's parameters are alive, and how many the rank trains."""
    disable_packing_detection()
    model = make_model("llama", 4)
    parameters = [weakref.ref(parameter) for parameter in model.parameters()]
    strategy = make_strategy({"pipeline": 2}, "1f1b", 1)
    strategy.prepare(LanguageModelLoss(model), OptimizerFactory(make_optimizer).make)
    del model
    gc.collect()
    torch.manual_seed(5)  # as at the beginning of a step
    strategy.forward_backward([MicroBatch(*data_of(0))] * 2, num_tokens=240)
    alive = sum(p().numel() for p in parameters if p() is not None)
    return alive, sum(p.numel() for p in strategy.parameters), torch.initial_seed()


def test_a_rank_keeps_only_its_layers_and_has_its_own_random_numbers():
    (one, trained, seed), (other, other_trained, other_seed) = values(run_ranks(hold, 2))
    assert (one, other) == (trained, other_trained)
    assert one + other == sum(
        parameter.numel() for parameter in make_model("llama", 4).parameters()
    )
    assert seed != other_seed
