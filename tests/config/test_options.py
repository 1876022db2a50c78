import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest

from llm.config.command_line import parse_options, split_config_file
from llm.config.options import fields, missing_requirements, option, option_group
from llm.config.toml import read_toml, to_toml
from llm.errors import ConfigError
from tests.support.programs import option_list


@dataclass(kw_only=True)
class Settings:
    learning_rate: float = option(0.1, "Rate.", group="Numbers", above=0)
    num_steps: int | None = option(None, "Steps.", group="Numbers", at_least=1)
    betas: tuple[float, ...] = option((0.9, 0.99), "Betas.", group="Numbers", below=1)
    shape: Literal["round", "square"] = option("round", "Shape.", group="Words")
    name: str | None = option(None, "Name.", group="Words", aliases=("title",))
    save_every: int | Literal["epoch"] | None = option(None, "Saving.", group="Words")
    resume: bool | str = option(False, "Resume.", group="Switches")
    shuffle: bool = option(True, "Shuffle.", group="Switches", aliases=("mix",))
    no_bias: bool = option(False, "No bias.", group="Switches")
    remove: bool = option(False, "Remove.", group="Orders", one_shot=True)
    halt: bool = option(False, "Halt.", group="Orders")
    limit: int | None = option(None, "Limit.", group="Orders", at_least=1)
    text: tuple[float | str, ...] = option((), "Text.", group="Orders", path=True)
    corners: int = option(
        4, "Corners.", group="Needs", requires=("shape=square", "name"), resume="fixed"
    )


def read(*argv: str) -> Settings:
    return parse_options(Settings, argv, prog="program", description="A program.")


def test_dashes_and_underscores_mean_the_same():
    assert read("--learning-rate", "0.5") == read("--learning_rate", "0.5")
    assert read("--learning-rate=0.5").learning_rate == 0.5


def test_the_command_line_overrides_the_file_and_the_file_the_defaults(tmp_path: Path):
    file = tmp_path / "run.toml"
    file.write_text("learning_rate = 1\nnum-steps = 7\n")

    settings = read("--config", str(file), "--num_steps", "9")

    assert settings.learning_rate == 1.0
    assert settings.num_steps == 9
    assert settings.shape == "round"


def test_a_switch_can_be_turned_on_and_off_under_each_of_its_names():
    assert read("--no_shuffle").shuffle is False
    assert read("--no_mix").shuffle is False
    assert read("--no_shuffle", "--mix").shuffle is True
    assert read("--no_bias").no_bias is True
    assert read("--no_bias", "--bias").no_bias is False


def test_a_second_file_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"--config is given twice, as a.toml and b.toml; give"):
        read("--config", "a.toml", "--config=b.toml")
    with pytest.raises(ConfigError, match="--config is given twice"):
        split_config_file(["--config", "a.toml", "--config", "b.toml"])


def test_the_last_value_of_an_option_counts_and_the_log_says_so(caplog: pytest.LogCaptureFixture):
    settings = read("--num_steps=3", "--title", "a", "--num-steps", "4", "--name", "a")
    assert (settings.num_steps, settings.name) == (4, "a")
    assert read("--betas", "0.5", "--shuffle", "--betas", "0.6", "0.7", "--no_mix").shuffle is False

    assert [record.getMessage() for record in caplog.records] == [
        "--num_steps is given twice: 4 counts, and 3 does not.",
        "--betas is given twice: 0.6 0.7 counts, and 0.5 does not.",
        "--shuffle is given twice: false counts, and true does not.",
    ]


def test_a_value_that_is_not_equal_to_itself_is_given_once(caplog: pytest.LogCaptureFixture):
    with pytest.raises(ConfigError, match="--learning_rate"):
        read("--learning_rate", "nan")
    assert caplog.messages == []


def test_a_file_that_sets_an_option_and_its_alias_must_set_the_same_value(tmp_path: Path):
    file = tmp_path / "run.toml"
    file.write_text('title = "a"\n')
    assert read_toml(Settings, file) == {"name": "a"}
    file.write_text('name = "a"\ntitle = "a"\n')
    assert read_toml(Settings, file) == {"name": "a"}
    file.write_text('name = "a"\ntitle = "b"\n')
    with pytest.raises(ConfigError, match=r"run.toml sets 'name' and its other name 'title' to"):
        read_toml(Settings, file)


def test_an_option_with_an_optional_path_may_stand_alone():
    assert read("--resume").resume is True
    assert read("--resume", "runs/a").resume == "runs/a"
    assert read("--resume", "runs/a", "--no_resume").resume is False
    assert read().resume is False


def test_an_option_of_two_types_reads_a_number_or_a_word():
    assert read("--save_every", "100").save_every == 100
    assert read("--save_every", "epoch").save_every == "epoch"


def test_none_unsets_an_optional_value(tmp_path: Path):
    file = tmp_path / "run.toml"
    file.write_text("num_steps = 7\n")
    assert read("--config", str(file), "--num_steps", "none").num_steps is None


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--learnin_rate", "1"], ["--learnin_rate", "did you mean learning_rate"]),
        (["--learning_rate", "fast"], ["--learning_rate", "a number", "'fast'"]),
        (["--learning_rate", "0"], ["--learning_rate", "greater than 0"]),
        (["--learning_rate", "-1e-3"], ["--learning_rate", "greater than 0", "not -0.001"]),
        (["--num_steps", "0"], ["--num_steps", "at least 1", "not 0"]),
        (["--num_steps", "1.5"], ["--num_steps", "an integer", "'1.5'"]),
        (["--betas", "0.9", "1"], ["--betas", "smaller than 1"]),
        (["--shape", "oval"], ["--shape", "one of round, square", "'oval'"]),
        (["--save_every", "day"], ["--save_every", "an integer or epoch", "'day'"]),
        (["--num_steps"], ["--num_steps", "expected one argument"]),
        (["--learning_rate", "inf"], ["--learning_rate", "a finite number", "inf"]),
        (["word"], ["'word'", "no option before it"]),
        (["--config", "missing.toml"], ["--config missing.toml", "No such file"]),
        (["--config", "."], ["--config . is a folder", "config.toml"]),
    ],
)
def test_a_wrong_option_is_refused_with_its_name_its_value_and_a_remedy(argv, words):
    with pytest.raises(ConfigError) as caught:
        read(*argv)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("lerning_rate = 1", ["lerning_rate", "did you mean learning_rate"]),
        ("learning_rate = 'fast'", ["learning_rate", "a number", "'fast'"]),
        ("shuffle = 1", ["shuffle", "true or false"]),
        ("[numbers]\nlearning_rate = 1", ["numbers", "no option"]),
        ("learning_rate", ["not valid TOML"]),
        ("no_shuffle = true", ["no_shuffle", "did you mean shuffle"]),
    ],
)
def test_a_wrong_file_is_refused_with_the_key_and_what_is_expected(tmp_path, text, words):
    file = tmp_path / "run.toml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_toml(Settings, file)
    for word in [*words, "run.toml"]:
        assert word in str(caught.value)


def test_settings_written_as_toml_read_back_the_same(tmp_path: Path):
    name = 'a "quoted" \\ name\n\x7f of a \N{FOX FACE}'
    settings = Settings(name=name, betas=(0.5,), save_every="epoch", resume=True)
    file = tmp_path / "run.toml"
    file.write_text(to_toml(settings))
    assert read("--config", str(file)) == settings


def test_an_option_for_one_start_is_not_recorded_and_the_page_says_so():
    assert "remove" not in to_toml(Settings(remove=True))
    assert "- **`remove`**†: Remove.\n" in option_list(Settings)


@pytest.mark.parametrize("text", ["a" * 256, "b/" + "\N{FOX FACE}" * 64, "c/" * 2048])
def test_a_path_beyond_the_systems_limits_is_refused_in_one_sentence(text):
    with pytest.raises(ConfigError, match=r"^--text .{40}\.\.\. is longer .* choose a shorter one"):
        read("--text", "0.5", text)
    assert read("--text", "0.5", "a" * 255, "--name", text).name == text


def test_help_names_every_option_and_its_default(capsys):
    with pytest.raises(SystemExit) as ended:
        read("--help")
    text = capsys.readouterr().out
    assert ended.value.code == 0
    for word in (
        "--learning_rate",
        "(default: 0.1)",
        "--no_shuffle",
        "--title",
        "{round,square}",
        "N|epoch",
    ):
        assert word in text
    assert "--bias" not in text.replace("--no_bias", "")
    assert "--limit" in text
    assert "--top" not in text
    assert "stop" not in text


def test_the_markdown_page_has_an_item_for_every_option():
    page = option_list(Settings)
    assert "## Numbers" in page
    assert "- **`name`**, `title`: Name.\n" in page
    assert "- **`shape`** (`round`): Shape. One of `round`, `square`.\n" in page
    assert "- **`limit`**: Limit.\n" in page


def test_an_option_without_the_option_it_requires_is_refused():
    without = "--corners needs --shape square or --name; give one of them too, or leave it out."
    assert missing_requirements(Settings(corners=5)) == [without]
    assert missing_requirements(Settings(corners=5, shape="square")) == []
    assert missing_requirements(Settings(corners=5, name="star")) == []
    assert missing_requirements(Settings()) == missing_requirements(Settings(corners=4)) == []


def test_auto_does_not_count_as_the_value_that_an_option_requires():
    @option_group("Balance")
    class Balance:
        by: Literal["auto", "loss", "both"] = option("auto", "Means.")
        scope: Literal["batch", "sample"] = option(
            "batch", "Scope.", requires=("by=loss", "by=both")
        )

    assert missing_requirements(Balance(scope="sample", by="loss")) == []
    assert missing_requirements(Balance(scope="sample")) == [
        "--scope needs --by loss or --by both; give one of them too, or leave it out. "
        "--by auto does not count, because it may choose another value."
    ]


def test_the_markdown_page_names_required_options_unless_the_help_does():
    page = option_list(Settings)
    assert r"- **`corners`**\* (`4`): Corners. Needs `shape square` or `name`." in page
    told = dataclasses.make_dataclass(
        "Told",
        [
            ("on", bool, option(False, "On.", group="G")),
            ("level", int, option(1, "Level of what is on.", group="G", requires=("on",))),
        ],
    )
    assert option_list(told).endswith(": Level of what is on.")


def test_the_markdown_page_names_once_what_a_whole_group_needs():
    needed = [(f"level_{i}", int, option(0, "Level.", requires=("on",))) for i in range(3)]
    group = dataclasses.make_dataclass("Group", [("on", bool, option(False, "On.")), *needed])
    page = option_list(group)
    assert "- **`on`**: On. The other options need it.\n" in page
    assert page.endswith("- **`level_2`**: Level.")


def test_the_markdown_page_only_names_options_that_another_page_describes():
    described = {field.name: field for field in fields(Settings)}
    shared = option(None, "Name.", aliases=("title", "label"))
    other = dataclasses.make_dataclass(
        "Other", [("name", str, shared), ("limit", int, option(3, "Limit of another kind."))]
    )
    page = option_list(other, shared_options=described)
    assert "- **`limit`** (`3`): Limit of another kind." in page
    assert page.endswith("As in [the trainer](#options-of-the-trainer): `name` or `label`.")


def test_the_markdown_page_lists_choices_unless_the_help_does():
    shape = option("flat", "Form: flat, or round.", group="G")
    named = dataclasses.make_dataclass("Named", [("shape", Literal["flat", "round"], shape)])
    assert option_list(named).endswith("- **`shape`** (`flat`): Form: flat, or round.")


def test_the_flag_of_the_positional_option_can_be_left_out():
    def named(*argv: str) -> str | None:
        return parse_options(Settings, argv, prog="program", description="", positional="name").name

    assert named("wiki") == named("--no_bias", "wiki") == named("--name", "wiki") == "wiki"
    with pytest.raises(ConfigError, match="'two' has no option before it"):
        named("--name", "one", "two")


@pytest.mark.parametrize("words", [["--no_remove"], ["--remove=false"], ["--remove", "False"]])
def test_a_switch_is_turned_off_by_its_opposite_or_by_the_value_false(words):
    assert read("--remove", *words).remove is False
    assert read("--no_shuffle", "false").shuffle is read("--no-mix=false").shuffle is True
    assert read("--remove=TRUE", "--no_bias", "true", "--shuffle").no_bias is True


def test_another_value_of_a_switch_is_refused_with_the_values_it_takes():
    with pytest.raises(ConfigError, match="--remove takes true, false or no value, and '5' follow"):
        read("--remove", "5")
    with pytest.raises(ConfigError, match="--no_bias expects true or false, not 'yes'"):
        read("--no_bias=yes")


def test_a_list_with_commas_is_refused_with_the_way_to_separate_items():
    said = (
        "--betas expects a list, each item a number, not '0.9,0.95'. Separate the items with blanks"
    )
    with pytest.raises(ConfigError, match=said):
        read("--betas", "0.9,0.95")


def test_options_have_the_heading_and_the_resume_rule_of_their_class():
    @option_group("Numbers", resume="fixed")
    class Numbers:
        seed: int = option(0, "Seed.")
        threads: int = option(1, "Threads.", resume="free")
        color: str = option("red", "Color.", group="Words")

    @option_group("Both")
    class Both(Numbers):
        speed: int = option(1, "Speed.")

    declared = {f.name: (f.option.group, f.option.resume) for f in fields(Both)}
    assert declared == {
        "speed": ("Both", "free"),
        "seed": ("Numbers", "fixed"),
        "threads": ("Numbers", "free"),
        "color": ("Words", "fixed"),
    }
    with pytest.raises(dataclasses.FrozenInstanceError):
        Both().seed = 1


def test_the_usage_names_the_positional_option_and_help_shows_an_example(capsys):
    with pytest.raises(SystemExit):
        parse_options(
            Settings, ["--help"], prog="show", description="", positional="name", example="a --mix"
        )
    text = capsys.readouterr().out
    assert text.startswith("usage: show NAME [--config FILE] [--OPTION VALUE ...]\n")
    assert text.endswith("\nexample:\n  show a --mix\n")
    with pytest.raises(SystemExit):
        parse_options(Settings, ["--help"], prog="show", description="", positional="text")
    assert capsys.readouterr().out.startswith("usage: show TEXT ... [--config FILE]")
    with pytest.raises(SystemExit):
        parse_options(Settings, ["--help"], prog="show", description="", usage="WORD -- REST")
    assert capsys.readouterr().out.startswith("usage: show WORD -- REST\n")


@pytest.mark.parametrize("argv", [[], ["--help"], ["--help", "core"], ["--size", "2"]])
def test_an_option_that_is_declared_twice_is_refused_with_both_classes(argv):
    @option_group("Core")
    class Core:
        size: int = option(1, "Size.")

    @option_group("More", extension=True)
    class More(Core):
        size: int = option(2, "Another size.")

    @option_group("All")
    class Settings(More, Core):
        pass

    with pytest.raises(ConfigError) as caught:
        parse_options(Settings, argv, prog="", description="")

    assert str(caught.value) == (
        "The option size of Core is declared again by More; give it another name there."
    )


def test_two_options_with_an_alias_or_a_flag_in_common_are_refused():
    @option_group("Aliases")
    class Aliases:
        size: int = option(1, "Size.", aliases=("length",))
        width: int = option(1, "Width.", aliases=("length",))

    @option_group("Switches")
    class Switches:
        log: bool = option(False, "Log.")
        no_log: int = option(1, "Lines to leave out.")

    with pytest.raises(ConfigError, match="name length belongs to the options size and width; "):
        fields(Aliases)
    with pytest.raises(ConfigError, match="name no_log belongs to the options log and no_log; "):
        fields(Switches)


def test_classes_that_are_put_together_can_each_add_choices(capsys):
    def shapes(cls: type) -> list[str]:
        return [shape for base in reversed(cls.__mro__) for shape in vars(base).get("SHAPES", ())]

    @option_group("Core")
    class Core:
        SHAPES = ("round", "square")
        COMMON = ("shape",)
        shape: str | None = option(None, "Shape.", choices=shapes)
        size: int = option(1, "Size.")

    @option_group("More")
    class More(Core):
        SHAPES = ("flat",)
        depth: int = option(1, "Depth.", common=True)

    assert parse_options(More, ["--shape", "flat"], prog="", description="").shape == "flat"
    assert "Shape. One of `round`, `square`, `flat`." in option_list(More)
    with pytest.raises(ConfigError, match="--shape expects one of round, square, not 'flat'"):
        parse_options(Core, ["--shape", "flat"], prog="", description="")
    with pytest.raises(SystemExit):
        parse_options(More, ["--help"], prog="", description="")
    shown = capsys.readouterr().out
    assert "--depth" in shown
    assert "--size" not in shown
