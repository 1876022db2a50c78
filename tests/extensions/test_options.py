"""What the options of extensions have in common: names, and what a run records of them."""

import pkgutil
import re
from collections import Counter
from importlib import import_module

from llm import extensions
from llm.config.options import fields
from llm.config.toml import to_toml
from llm.trainers.gpt.config import CoreConfig
from llm.trainers.gpt.extensions import EXTENSIONS, GPTConfig
from llm.trainers.gpt.recorded_options import make_options_record
from llm.trainers.gpt.seams import Extension, LoopExtension, list_option_classes
from tests.support.package import PACKAGE, ROOT


def test_every_folder_is_listed_once():
    folders = sorted(path.parent.name for path in PACKAGE.glob("extensions/*/options.py"))
    assert sorted(each.__module__.split(".")[2] for each in EXTENSIONS) == folders


def test_no_two_extensions_answer_the_same_question_of_the_core():
    answers = (name for each in list_option_classes(EXTENSIONS) for name in vars(each))
    number = Counter(name for name in answers if isinstance(getattr(CoreConfig, name, 0), property))
    assert number == {"replica_option": 1, "step_change_option": 1, "extra_optimizer_option": 1}


def test_every_part_of_a_checkpoint_has_another_name():
    for module in pkgutil.walk_packages(extensions.__path__, "llm.extensions."):
        import_module(module.name)
    shipped = [each for each in LoopExtension.__subclasses__() if each.__module__[:4] == "llm."]
    parts = [
        "strategy",
        "train",
        "meter",
        "kfac",
        "hyperball",
        *(each.part for each in shipped if each.part),
    ]
    assert {"ema", "spikes"} < {*parts}
    assert len(parts) == len({*parts})


def test_the_options_of_the_core_come_first():
    names = [field.name for field in fields(GPTConfig)]
    core = [field.name for field in fields(CoreConfig)]
    assert names[: len(core)] == core


def test_a_run_records_an_extensions_options_only_if_they_are_given():
    plain, given = GPTConfig(), GPTConfig(mup=True, mup_base_width=64, ema_decay=0.9)
    assert "ema_decay = 0.9\n" in to_toml(given)
    assert "mup_base_width = 64\n" in to_toml(given)
    assert "ema_decay" not in to_toml(plain)
    assert "mup_base_width" not in to_toml(plain)
    more = {
        kind: set(values) - set(make_options_record(plain)[kind])
        for kind, values in make_options_record(given).items()
    }
    assert more == {"fixed": {"mup", "mup_base_width"}, "logged": {"ema_decay"}}


def test_the_page_lists_every_hook():
    page = (ROOT / "docs" / "extend.md").read_text(encoding="utf-8")
    section = page.partition("## What an extension can do")[2].partition("\n## ")[0]
    items = re.findall(r"^- ((?:`\w+`,? )*`\w+`)", section, re.MULTILINE)
    listed = set(re.findall(r"\w+", "\n".join(items)))
    hooks = {name for cls in (Extension, LoopExtension) for name in vars(cls) if name[0] != "_"}
    hooks.remove("package")  # which the loader sets
    answers = {name for name, value in vars(CoreConfig).items() if isinstance(value, property)}
    assert listed == {
        *hooks,
        *answers,
        "OPTIMIZERS",
        "step_change_option",
        "extra_optimizer_option",
    }
