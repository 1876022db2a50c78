"""Classes of optimizers, by their names: what a trial finds, and which are refused."""

import json
import re
import shutil
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

from llm.config.toml import read_toml
from llm.errors import ConfigError
from llm.extensions.custom_optim.class_optimizer import ClassOptimizer
from llm.extensions.custom_optim.class_trial import try_class
from llm.extensions.custom_optim.import_class import find_version, import_optimizer
from llm.extensions.custom_optim.options import CustomOptimizerExtension
from llm.trainers.gpt.config import check_config
from llm.trainers.gpt.extensions import GPTConfig
from llm.trainers.gpt.seams import choose_factory, make_extensions
from tests.extensions.custom_optim.classes import Counting
from tests.support.models import still_model
from tests.support.package import ROOT

CLASSES = "tests.extensions.custom_optim.classes"


def traits_of(name: str):
    options = GPTConfig(optimizer=name if ":" in name else f"{CLASSES}:{name}")
    return try_class(import_optimizer(options), torch.device("cpu"))


def make(name: str, model: torch.nn.Module, **options):
    config = GPTConfig(optimizer=name if ":" in name else f"{CLASSES}:{name}", **options)
    return choose_factory(config, make_extensions(config), seed=0).make(model, None)


@pytest.mark.parametrize("name", ["Adamax", "NAdam", "RMSprop", "ASGD"])
def test_a_trial_finds_that_a_class_of_torch_is_elementwise(name):
    traits = traits_of(f"torch.optim:{name}")

    assert traits.is_elementwise
    assert [traits.is_coupled, traits.is_random, traits.reads_found_inf] == [False] * 3
    assert traits.scalar_devices["step"] == torch.device("cpu")


@pytest.mark.parametrize(
    ("name", "trait"),
    [("Counting", "is_elementwise"), ("Coupled", "is_coupled"), ("Noisy", "is_random")],
)
def test_a_trial_tells_classes_apart(name, trait):
    assert getattr(traits_of(name), trait)
    assert not getattr(traits_of("RowNormed"), trait)


def test_the_log_names_attributes_that_checkpoints_do_not_hold():
    description = make("Tallying", still_model()).describe()

    assert "Tallying changes num_steps outside of its state, which" in description
    assert "outside of its state" not in make("Counting", still_model()).describe()


def test_a_class_may_change_its_weight_decay():
    assert traits_of("Decaying").is_elementwise


def test_torchs_fused_classes_skip_a_step_on_the_device():
    options = GPTConfig(optimizer="torch.optim:Adam", optimizer_kwargs='{"fused": true}')

    assert try_class(import_optimizer(options), torch.device("cpu")).reads_found_inf
    assert traits_of("Skipping").reads_found_inf
    assert not traits_of("torch.optim:Adam").reads_found_inf


def test_a_search_for_the_batch_size_with_a_class_is_refused():
    config = GPTConfig(optimizer="torch.optim:Adamax", per_device_train_batch_size="auto")
    [problem] = CustomOptimizerExtension(config).find_problems()
    assert problem.startswith("--per_device_train_batch_size auto would not measure the state of")


def test_a_class_of_a_module_without_a_spec_is_looked_for_in_it(monkeypatch):
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)  # as in a script
    with pytest.raises(
        ConfigError, match=r"^--optimizer __main__:Nowhere: the module __main__ has"
    ):
        import_optimizer(GPTConfig(optimizer="__main__:Nowhere"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"optimizer": "no_such_package:Class"},
            "the module no_such_package is neither installed nor in ",
        ),
        ({"optimizer": "torch.nothing:Class"}, "the module torch.nothing cannot be imported (Mod"),
        ({"optimizer": "torch.optim:Nothing"}, "the module torch.optim has no class Nothing."),
        ({"optimizer": f"{CLASSES}:NOT_A_CLASS"}, "NOT_A_CLASS is not a subclass of torch.optim"),
        ({"optimizer": "torch.optim:LBFGS", "weight_decay": 0.1}, "LBFGS needs a closure"),
        ({"optimizer": f"{CLASSES}:Closing"}, "Closing needs a closure"),
        ({"optimizer": "torch.optim:SparseAdam"}, "SparseAdam does not support dense gradients"),
        ({"optimizer": "torch.optim:Muon"}, "Muon only supports 2D parameters"),
        ({"optimizer": f"{CLASSES}:Switching"}, "other weights for training than for evaluation"),
        ({"optimizer": f"{CLASSES}:WithoutRate"}, "takes no lr, which the learning-rate schedule"),
        (
            {"optimizer": f"{CLASSES}:WithoutDecay", "weight_decay": 0.1},
            "takes no weight_decay; leave --weight_decay out, or set it to 0.",
        ),
        ({"optimizer": f"{CLASSES}:FalselyElementwise"}, "is not elementwise: it trains the halv"),
        ({"optimizer": f"{CLASSES}:NotSkipping"}, "changes weights although it is 1"),
        ({"optimizer": f"{CLASSES}:Forgetful"}, "keeps a value outside of its state"),
        (
            {"optimizer": f"{CLASSES}:Dividing"},
            "Dividing makes weights that are not finite in a trial on a matrix and a vector;",
        ),
        ({"optimizer": f"{CLASSES}:DividingByRate"}, "if the learning rate begins at 0; correct"),
        ({"optimizer": f"{CLASSES}:Replacing"}, "puts new tensors in the place of weights (p.dat"),
        ({"optimizer": f"{CLASSES}:Listing"}, "keeps 'past' in its state, a list, which"),
        (
            {"optimizer": f"{CLASSES}:Coupled", "data_parallel_shard_size": 2},
            "depending on other weights, which --data_parallel_shard_size divides",
        ),
        (
            {
                "optimizer": f"{CLASSES}:Noisy",
                "optimizer_input": "matrices",
                "tensor_parallel_size": 2,
            },
            "draws random numbers, which would differ between ranks",
        ),
        (
            {"optimizer": f"{CLASSES}:Counting", "optimizer_kwargs": '{"betta": 0.9}'},
            "--optimizer_kwargs sets betta, which tests.extensions.custom_optim.classes:Counting "
            "does not take; it takes beta.",
        ),
        (
            {"optimizer": "torch.optim:SGD", "optimizer_kwargs": '{"momentum": -1}'},
            "(ValueError: Invalid momentum value: -1); check --optimizer_kwargs",
        ),
    ],
)
def test_what_a_class_cannot_do_is_refused_by_name(options, message):
    config = GPTConfig(**options)

    with pytest.raises(ConfigError, match=re.escape(message)) as caught:
        choose_factory(config, make_extensions(config), seed=0)

    assert str(caught.value).endswith(".")


def test_whole_matrices_are_the_choice_for_a_class_that_says_nothing():
    silent = make("ColumnNormed", still_model()).describe()
    declared = make("Counting", still_model()).describe()
    given = make("Counting", still_model(), optimizer_input="matrices").describe()

    assert "it updates whole matrices, each on one rank, because it does not say" in silent
    assert "it updates shards, because its attribute whole_matrices is False" in declared
    assert "because --optimizer_input says matrices" in given


def test_the_version_is_the_distributions_or_a_digest_of_the_file():
    assert find_version(torch.optim.Adamax) == f"torch {version('torch')}"
    assert re.fullmatch("SHA-256 [0-9a-f]{16} of its file", find_version(Counting))


def take_steps(optimizer, params, steps: range, rate: float = 0.1) -> None:
    for step in steps:
        for group in optimizer.param_groups:
            group["lr"] = rate / (1 + step)
        for index, p in enumerate(params):
            generator = torch.Generator().manual_seed(10 * step + index)
            p.grad = torch.randn(p.shape, generator=generator)
        optimizer.step()


def test_numbers_of_state_and_groups_are_saved_as_tensors_and_restored():
    params = [torch.nn.Parameter(torch.ones(3, 2)), torch.nn.Parameter(torch.ones(4))]
    plain = Counting([{"params": params, "weight_decay": 0.1}])
    take_steps(plain, params, range(4))
    expected = [p.detach().clone() for p in params]

    def restart(weights):
        params = [torch.nn.Parameter(weight.clone()) for weight in weights]
        groups = [{"params": params, "weight_decay": 0.1}]
        return params, ClassOptimizer(lambda g, lr: Counting(g, lr=lr), groups, lr=1e-3)

    params, optimizer = restart([torch.ones(3, 2), torch.ones(4)])
    take_steps(optimizer, params, range(2))
    states = [optimizer.state[p] for p in params]
    assert states[0]["number.step"].item() == 2
    assert states[0]["group.rate_sum"].item() == 0.1 + 0.05
    params, resumed = restart(params)
    resumed.allocate_state(
        {p: {k: t.to("meta") for k, t in s.items()} for p, s in zip(params, states, strict=True)}
    )
    for p, state in zip(params, states, strict=True):
        for key, tensor in resumed.state[p].items():
            tensor.copy_(state[key])
    take_steps(resumed, params, range(2, 4))

    assert all(map(torch.equal, params, expected))


def test_a_skipped_step_changes_neither_weights_nor_state():
    param = torch.nn.Parameter(torch.ones(3, 2))
    optimizer = ClassOptimizer(
        lambda g, lr: Counting(g, lr=lr), [{"params": [param], "weight_decay": 0.0}], lr=1e-3
    )
    take_steps(optimizer, [param], range(1))
    state = {key: tensor.clone() for key, tensor in optimizer.state[param].items()}
    weight = param.detach().clone()

    optimizer.found_inf = torch.ones(())
    take_steps(optimizer, [param], range(1, 2))

    assert torch.equal(param, weight)
    assert all(torch.equal(tensor, state[key]) for key, tensor in optimizer.state[param].items())


def test_the_state_is_measured_on_weights_without_values():
    model = still_model().to("meta")
    optimizer = make("RowNormed", model).optimizer
    states = {p: optimizer.state[p]["squares"].shape for p in optimizer.state}
    assert all(shape == (len(p), 1) for p, shape in states.items())
    assert len(states) == len(list(model.parameters()))
    assert make("RowNormed", model).traffic().bytes_per_element == 12
    assert make("Counting", model).traffic() is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "cannot be read (malformed JSON at line 1, column 2)"),
        ("[1]", "--optimizer_kwargs expects a JSON object"),
        ('{"lr": 1}', "sets lr, which --learning_rate sets; leave it out."),
        ('{"weight_decay": 1}', "sets weight_decay, which --weight_decay sets"),
    ],
)
def test_arguments_that_cannot_be_read_are_refused_by_the_rules(text, message):
    config = GPTConfig(optimizer="torch.optim:Adamax", optimizer_kwargs=text)
    problems = [
        problem for extension in make_extensions(config) for problem in extension.find_problems()
    ]
    assert len(problems) == 1
    assert message in problems[0]


def test_lists_of_the_arguments_become_tuples():
    options = GPTConfig(
        optimizer="torch.optim:Adamax", optimizer_kwargs=json.dumps({"betas": [0.8, 0.9]})
    )
    assert import_optimizer(options).arguments == {"betas": (0.8, 0.9)}


def test_a_table_of_a_file_has_the_arguments_of_the_json(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text("optimizer_kwargs = { betas = [0.9, 0.98] }")
    assert read_toml(GPTConfig, file) == {"optimizer_kwargs": '{"betas": [0.9, 0.98]}'}


@pytest.mark.parametrize(
    ("options", "arguments"),
    [
        ({"momentum": 0.9}, '{"momentum": 0.9}'),
        ({"betas": (0.9, 0.98), "eps": 1e-6}, '{"betas": [0.9, 0.98], "eps": 1e-06}'),
    ],
)
def test_an_option_of_other_optimizers_is_refused_with_the_one_of_classes(options, arguments):
    config = GPTConfig(optimizer="torch.optim:SGD", **options)
    with pytest.raises(ConfigError) as caught:
        check_config(config)
    for name in options:
        assert f"--{name} " in str(caught.value)
    assert (
        "Arguments of the class torch.optim:SGD are set with --optimizer_kwargs, such as "
        f"'{arguments}'." in str(caught.value)
    )


def test_arguments_without_a_class_are_refused():
    config = GPTConfig(optimizer="sgd", optimizer_kwargs="{}", optimizer_input="shards")
    problems = [
        problem for extension in make_extensions(config) for problem in extension.find_problems()
    ]
    assert [problem.split()[0] for problem in problems] == [
        "--optimizer_kwargs",
        "--optimizer_input",
    ]


def test_the_example_of_the_guide_is_the_class_that_is_tested():
    source = (Path(__file__).parent / "lion.py").read_text(encoding="utf-8")
    guide = (ROOT / "docs" / "guides" / "optimizers.md").read_text(encoding="utf-8")
    [block] = re.findall(r'```python title="lion.py"\n(.*?)```', guide, re.DOTALL)
    assert block == source.partition("\n\n")[2].lstrip()


def test_the_example_of_the_guide_trains_from_the_current_folder(tmp_path, monkeypatch):
    shutil.copy(Path(__file__).parent / "lion.py", tmp_path / "lion_of_a_reader.py")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    options = {"optimizer_kwargs": '{"betas": [0.95, 0.98]}', "learning_rate": 1e-3}
    model = still_model()
    run_optimizer = make("lion_of_a_reader:Lion", model, **options)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}

    for p in model.parameters():
        p.grad = torch.ones_like(p)
    run_optimizer.optimizer.step()

    assert "it updates shards" in run_optimizer.describe()
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.detach(), before[name] - 1e-3)
