"""Runs with the class of an optimizer, against plain loops, on other layouts, and resumed."""

import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from llm.errors import ConfigError
from llm.models.attention import disable_packing_detection
from llm.models.loss import LanguageModelLoss
from llm.optim.groups import embeddings_and_head, has_weight_decay
from llm.parallel.base import AcceleratedStrategy
from llm.tools.plan.plan import main as plan
from llm.trainers.gpt.extensions import GPTConfig
from llm.trainers.gpt.seams import choose_factory, make_extensions
from tests.extensions.custom_optim.classes import Counting, RowNormed
from tests.support import layouts
from tests.support.faults import Fault
from tests.support.matrix_runs import train, whole_weights
from tests.support.models import still_model
from tests.support.ranks import run_ranks, values
from tests.support.recovery import last_hash
from tests.support.training import FROM_PARENT, NO_DROPOUT, Bench, assert_refused

CLASSES = "tests.extensions.custom_optim.classes"
KINDS: dict[str, dict[str, Any]] = {
    "elementwise": {"optimizer": f"{CLASSES}:Counting", "optimizer_kwargs": '{"beta": 0.8}'},
    "matrices": {"optimizer": f"{CLASSES}:RowNormed"},
    "a class of torch": {"optimizer": "torch.optim:Adamax", "optimizer_kwargs": '{"eps": 1e-4}'},
}


def make_strategy(
    kind: str, sizes: dict[str, int] | None, family: str = "gpt2"
) -> AcceleratedStrategy:
    disable_packing_detection()
    options = GPTConfig(
        learning_rate=1e-3, embedding_learning_rate=2e-3, weight_decay=0.1, **KINDS[kind]
    )
    strategy = (
        AcceleratedStrategy(layouts.cpu_accelerator())
        if sizes is None
        else layouts.make_strategy(sizes)
    )
    factory = choose_factory(options, make_extensions(options), seed=0)
    strategy.prepare(LanguageModelLoss(still_model(family)), factory.make)
    return strategy


def run(sizes, family="gpt2"):
    """Weights by kind, and on this rank the shapes of the optimizer's state."""
    found = {}
    for kind in KINDS:
        strategy = make_strategy(kind, sizes, family)
        train(strategy, range(3))
        shapes = [tuple(t.shape) for s in strategy.optimizer.state.values() for t in s.values()]
        found[kind] = whole_weights(strategy), shapes
    strategy.close()
    return found


@pytest.fixture(scope="module")
def alone():
    return values(run_ranks(run, 1, {}))[0]


def plain_groups(model: torch.nn.Module) -> list[dict[str, Any]]:
    """The groups by hand: matrices decay, and embeddings, head and vectors have twice the rate."""
    ends = embeddings_and_head(model)
    return [
        {
            "params": [p],
            "weight_decay": 0.1 if has_weight_decay(name, p) else 0.0,
            "lr": 2e-3 if p in ends or not has_weight_decay(name, p) else 1e-3,
        }
        for name, p in model.named_parameters()
    ]


PLAIN = {
    "elementwise": lambda groups: Counting(groups, beta=0.8),
    "matrices": RowNormed,
    "a class of torch": lambda groups: torch.optim.Adamax(groups, eps=1e-4),
}


@pytest.mark.parametrize("kind", KINDS)
def test_steps_are_those_of_a_plain_loop(alone, kind):
    model = still_model()
    optimizer = PLAIN[kind](plain_groups(model))
    for step in range(3):
        inputs, labels = layouts.step_data(step)
        logits = model(inputs).logits.flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(logits, labels.flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()

    for name, weight in model.state_dict().items():
        torch.testing.assert_close(alone[kind][0][name], weight, rtol=0, atol=2e-5)


@pytest.mark.parametrize(
    ("ranks", "sizes"),
    [
        pytest.param(2, None, marks=pytest.mark.extended),
        (2, {"shard": 2}),
        pytest.param(4, {"shard": 2, "tensor": 2}, marks=pytest.mark.layouts),
        pytest.param(4, {"shard": 2, "pipeline": 2}, marks=pytest.mark.layouts),
        pytest.param(4, {"shard": 2}, marks=pytest.mark.layouts),
        pytest.param(2, {"pipeline": 2}, marks=pytest.mark.layouts),
        pytest.param(4, {"shard": 2, "context": 2}, marks=pytest.mark.layouts),
    ],
)
def test_steps_on_other_layouts_are_those_of_one_rank(alone, ranks, sizes):
    found = values(run_ranks(run, ranks, sizes))
    for kind in KINDS:
        for name, weight in found[0][kind][0].items():
            torch.testing.assert_close(weight, alone[kind][0][name], rtol=0, atol=2e-5)
    if ranks == 2 and sizes == {"shard": 2}:  # each matrix has one owner
        rows = [shape[0] for of_rank in found for shape in of_rank["matrices"][1]]
        assert sorted(rows) == sorted(shape[0] for shape in alone["matrices"][1])


@pytest.mark.layouts
@pytest.mark.parametrize("sizes", [{"shard": 2, "expert": 2}, {"expert": 2}])
def test_experts_that_ranks_divide_train_as_on_one_rank(sizes):
    divided, whole = (
        values(run_ranks(run, ranks, sizes_of_ranks, "mixtral"))[0]
        for ranks, sizes_of_ranks in ((2, sizes), (1, {}))
    )
    for kind in KINDS:
        for name, weight in divided[kind][0].items():
            torch.testing.assert_close(weight, whole[kind][0][name], rtol=0, atol=2e-5)


@pytest.fixture(scope="module")
def bench(tmp_path_factory) -> Bench:
    return Bench(tmp_path_factory.mktemp("bench"), lines=60, **NO_DROPOUT)


SHORT = {"per_device_train_batch_size": 2, "checkpointing_steps": 1, "weight_decay": 0.1}


def options_of(kind: str) -> dict[str, Any]:
    return SHORT | KINDS[kind]


@pytest.mark.parametrize(
    "kind", ["elementwise", pytest.param("matrices", marks=pytest.mark.extended)]
)
def test_a_resumed_run_ends_in_the_same_bits(bench, kind):
    options = options_of(kind)
    straight = bench.train_well(f"straight-{kind}", max_train_steps=4, **options)
    bench.train_well(f"cut-{kind}", max_train_steps=2, **options)
    cut = bench.train_well(f"cut-{kind}", max_train_steps=4, resume_from_checkpoint=True, **options)

    assert last_hash(cut) == last_hash(straight)


@pytest.mark.extended
@pytest.mark.parametrize("kind", ["elementwise", "matrices"])
def test_a_run_on_two_sharded_ranks_resumes_on_four_and_on_two(bench, kind):
    options = options_of(kind) | {"global_batch_size": 8, "per_device_train_batch_size": 1}
    sharded = options | {"data_parallel_shard_size": 2}
    name = f"sharded-{kind}"
    straight = bench.train_well(name, ranks=2, max_train_steps=3, **sharded)
    weights = exported(straight.folder)
    for ranks, sizes in ((4, {"data_parallel_shard_size": 4}), (2, sharded)):
        copy = bench.folder / f"{name}-{ranks}"
        shutil.copytree(straight.folder, copy)
        resumed = bench.train_well(
            copy.name,
            ranks=ranks,
            max_train_steps=3,
            resume_from_checkpoint=copy / "checkpoints" / "step_00000002",
            **options | sizes,
        )
        for key, weight in exported(resumed.folder).items():
            torch.testing.assert_close(weight, weights[key], rtol=0, atol=1e-5)
    assert last_hash(resumed) == last_hash(straight)


def exported(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def test_the_log_names_the_class_and_a_resume_with_another_is_refused(bench):
    options = {"max_train_steps": 2, **options_of("elementwise")}
    run = bench.train_well("named", **options)
    assert re.search(
        rf"optimizer: {CLASSES}:Counting of SHA-256 [0-9a-f]{{16}} of its file; where ranks "
        "divide the weights it updates shards, because its attribute whole_matrices is False",
        run.output,
    )
    for change, message in (
        ({"optimizer": "adamw", "optimizer_kwargs": None}, f"optimizer was '{CLASSES}:Counting'"),
        ({"optimizer": "torch.optim:Adamax", "optimizer_kwargs": None}, "is 'torch.optim:Adamax'"),
        ({"optimizer_kwargs": '{"beta": 0.7}'}, "optimizer_kwargs was '{\"beta\": 0.8}' and is"),
    ):
        refused = bench.train(
            "named", **options | change | {"max_train_steps": 3, "resume_from_checkpoint": True}
        )
        assert refused.codes == [2]
        assert message in refused.output
        assert "Traceback" not in refused.output


def test_a_resume_without_the_module_is_refused(bench, monkeypatch):
    options = {"max_train_steps": 1, **options_of("elementwise")}
    bench.train_well("without", **options)
    monkeypatch.setitem(sys.modules, CLASSES, None)

    with pytest.raises(ConfigError) as caught:
        bench.read("without", resume_from_checkpoint=True, **options)

    assert f"the module {CLASSES} cannot be imported" in str(caught.value)
    assert "resume_from" not in str(caught.value)


def test_an_error_of_a_class_names_its_code_and_the_last_checkpoint(bench):
    # The first checkpoint is still being written when the class fails.
    slow_save = Fault(at="llm.checkpoint.save:commit_checkpoint", what="wait", amount=0.5)
    options = {**SHORT, "optimizer": f"{CLASSES}:Failing", "checkpointing_steps": 2}

    run = bench.train("failing", faults=[slow_save], **options)

    assert run.codes == [1]
    assert re.search(
        rf"RuntimeError: the roof fell in\nThis error in {CLASSES} \(\S+/classes.py, line \d+\) "
        r"ended the run after step 2 of \d+; the last checkpoint is \S+/step_00000002.\n",
        run.output,
    )
    assert run.saved_steps == [2]


@pytest.mark.extended
def test_a_step_without_a_finite_gradient_is_skipped_on_all_ranks(bench):
    options = options_of("elementwise") | {"data_parallel_shard_size": 2, "max_train_steps": 4}
    fault = Fault(at="llm.models.loss:LanguageModelLoss.forward", what="nan", call=2, rank=1)

    run = bench.train_well("skipped", ranks=2, faults=[fault], **options)

    assert [record["skipped_steps"] for record in run.metrics] == [0, 1, 1, 1]
    files = (run.folder / "checkpoints" / "step_00000004").glob("*.safetensors")
    tensors = {name: tensor for file in files for name, tensor in load_file(file).items()}
    assert {t.item() for name, t in tensors.items() if name.endswith("number.step")} == {3}
    rate_sums = {t.item() for name, t in tensors.items() if name.endswith("group.rate_sum")}
    assert rate_sums == {1e-3 + 1e-3 + 1e-3}


@pytest.mark.extended
def test_mup_scales_the_rates_of_a_class_as_it_scales_adamws(bench):
    options = SHORT | {"mup": True, "mup_base_width": 16, "max_train_steps": 2}
    named = bench.train_well("mup-named", optimizer="torch.optim:AdamW", **options)
    core = bench.train_well("mup-core", optimizer="adamw", **options)
    weights = exported(core.folder)
    for key, weight in exported(named.folder).items():
        torch.testing.assert_close(weight, weights[key], rtol=0, atol=1e-6)


def test_a_file_of_options_names_a_class_and_plan_counts_its_state(bench, tmp_path, capsys):
    file = tmp_path / "run.toml"
    file.write_text('optimizer = "torch.optim:Adamax"\noptimizer_kwargs = \'{"eps": 1e-6}\'\n')
    words = ["--model_type", "gpt2", "--model_size", "124M", "--device", "a100-40gb"]
    sizes = []
    for extra in (["--config", str(file)], ["--optimizer", "adamw"], ["--optimizer", "sgd"]):
        assert plan([*words, *extra]) == 0
        sizes.append(re.search("optimizer.*", capsys.readouterr().out)[0])
    assert sizes[0] == sizes[1] != sizes[2]


@pytest.mark.extended
def test_a_branch_takes_a_class_only_from_its_own_command(bench, caplog):
    bench.train_well("parent", max_train_steps=1, **options_of("elementwise"))
    branch = {**FROM_PARENT, "branch_from": bench.folder / "parent", "max_train_steps": 2}

    with pytest.raises(ConfigError, match="--optimizer_kwargs is for the class in --optimizer"):
        bench.read("branch", **branch)
    assert "config.toml sets --optimizer, which a branch takes only from its own" in caplog.text
    named = bench.read("branch", optimizer=f"{CLASSES}:Counting", **branch)

    assert named.config.optimizer_kwargs == '{"beta": 0.8}'


@pytest.mark.extended
def test_a_refusal_on_two_ranks_is_one_sentence(bench):
    assert_refused(
        bench,
        ranks=2,
        optimizer=f"{CLASSES}:Noisy",
        words=["draws random numbers, which would differ between ranks"],
    )
