"""Durations: the text that users write, and the aliases that take a number of one unit."""

import copy
import json
import pickle
from dataclasses import dataclass

import pytest

from llm.config.command_line import parse_options
from llm.config.duration import Duration
from llm.config.options import fields, option
from llm.config.toml import read_toml, to_toml
from llm.errors import ConfigError
from llm.trainers.gpt.extensions import GPTConfig
from llm.trainers.gpt.main import parse_args

ENOUGH = ("--train_file", "a.txt", "--model_name_or_path", "gpt2")


@dataclass(kw_only=True)
class Options:
    length: Duration = option(
        Duration("3 epochs"),
        "The length.",
        group="Length",
        units={"steps": "max_steps", "tokens": "max_tokens", "epochs": "num_epochs"},
        yields="num_epochs",
        at_least=1,
    )
    interval: Duration | None = option(
        None, "The interval.", group="Length", units={"steps": "every_steps", "epochs": ""}
    )


def read(*words: str) -> Options:
    return parse_options(Options, words, prog="train", description="Trains.")


def read_file(tmp_path, text: str) -> Options:
    path = tmp_path / "run.toml"
    path.write_text(text)
    return Options(**read_toml(Options, path))


@pytest.mark.parametrize(
    ("text", "value", "unit", "plain"),
    [
        ("600 steps", 600, "steps", "600 steps"),
        ("600steps", 600, "steps", "600 steps"),
        ("1_000 samples", 1000, "samples", "1000 samples"),
        ("1 epoch", 1, "epochs", "1 epoch"),
        ("1 epochs", 1, "epochs", "1 epoch"),
        ("10K steps", 10_000, "steps", "10000 steps"),
        ("2.5B tokens", 2_500_000_000, "tokens", "2500000000 tokens"),
        ("0.3b tokens", 300_000_000, "tokens", "300000000 tokens"),
        ("1T tokens", 10**12, "tokens", "1000000000000 tokens"),
        ("20 tokens per parameter", 20, "tokens per parameter", "20 tokens per parameter"),
        ("0.5 tokens per parameter", 0.5, "tokens per parameter", "0.5 tokens per parameter"),
    ],
)
def test_a_duration_is_a_number_and_a_unit(text, value, unit, plain):
    duration = Duration(text)
    assert (duration.value, duration.unit, duration) == (value, unit, plain)
    assert Duration(duration) == duration
    for copied in (copy.deepcopy(duration), pickle.loads(pickle.dumps(duration))):
        assert (copied, copied.value, copied.unit) == (duration, value, unit)
    assert json.dumps(duration) == f'"{plain}"'


@pytest.mark.parametrize(
    "text", ["steps", "1.5 steps", "2.0001K tokens", "5 parsecs", "inf steps", "5%", ""]
)
def test_text_that_is_not_a_duration_is_refused_by_name(text, tmp_path):
    message = "expects a number of steps, tokens or epochs, such as '100 steps'"
    with pytest.raises(ConfigError, match=f"--length {message}, not '{text}'"):
        read(f"--length={text}")
    with pytest.raises(ConfigError, match=f"length {message}"):
        read_file(tmp_path, f'length = "{text}"')


def test_a_number_without_a_unit_is_shown_with_one(tmp_path):
    message = "expects a number of steps, tokens or epochs, such as '600 steps', not"
    with pytest.raises(ConfigError, match=f"--length {message} '600'"):
        read("--length", "600")
    with pytest.raises(ConfigError, match=f"length {message} 600"):
        read_file(tmp_path, "length = 600")


def test_an_option_takes_its_units_only():
    with pytest.raises(ConfigError, match="--length expects a number of steps, tokens or epochs"):
        read("--length", "600 samples")
    with pytest.raises(ConfigError, match="--interval expects a number of steps or epochs"):
        read("--interval", "1B tokens")
    with pytest.raises(ConfigError, match="--length must be at least 1, not 0 steps"):
        read("--max_steps", "0")
    with pytest.raises(ConfigError, match=r"^--tokens_per_parameter cannot be inf\.$"):
        parse_args([*ENOUGH, "--tokens_per_parameter", "inf"])


@pytest.mark.parametrize(
    ("words", "length"),
    [
        (["--max_steps", "600"], "600 steps"),
        (["--max-steps=600"], "600 steps"),
        (["--max_tokens", "2.5B"], "2500000000 tokens"),
        (["--num_epochs", "1"], "1 epoch"),
        (["--max_steps", "none"], "3 epochs"),
        # As in transformers, a number of steps overrides the epochs.
        (["--num_epochs", "1", "--max_steps", "600"], "600 steps"),
        (["--max_steps", "600", "--length", "600 steps"], "600 steps"),
    ],
)
def test_an_alias_takes_a_number_of_its_unit(words, length):
    assert read(*words).length == length


def test_an_alias_takes_the_name_of_a_unit_without_an_alias():
    assert read("--every_steps", "epoch").interval == "1 epoch"
    with pytest.raises(ConfigError, match="--every_steps expects an integer or epoch, not 'day'"):
        read("--every_steps", "day")
    with pytest.raises(ConfigError, match="--max_steps expects an integer, not 'epoch'"):
        read("--max_steps", "epoch")


def test_two_names_of_one_duration_are_refused_in_one_sentence(tmp_path):
    with pytest.raises(ConfigError) as caught:
        read("--max_steps", "600", "--max_tokens", "1B")
    assert str(caught.value) == "--max_steps and --max_tokens each set length; give one of them."
    with pytest.raises(ConfigError, match="--length and --max_steps each set length"):
        read("--length", "1B tokens", "--max_steps", "600")
    with pytest.raises(ConfigError, match=r"run.toml: max_steps and max_tokens each set length;"):
        read_file(tmp_path, 'max_steps = 600\nmax_tokens = "1B"')


def test_the_command_line_overrides_another_unit_of_the_file(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text('max_tokens = "1B"\nevery_steps = "epoch"\n')

    assert read("--config", str(path)).length == "1000000000 tokens"
    options = read("--config", str(path), "--max_steps", "600")

    assert (options.length, options.interval) == ("600 steps", "1 epoch")
    assert to_toml(options) == '# Length\nlength = "600 steps"\ninterval = "1 epoch"\n'
    assert read_file(tmp_path, to_toml(options)) == options


def test_the_help_lists_the_aliases_with_the_option(capsys):
    with pytest.raises(SystemExit):
        read("--help")
    text = " ".join(capsys.readouterr().out.split())
    assert "--length DURATION The length. (default: 3 epochs) Aliases: --max_steps N," in text
    assert "--max_tokens TOKENS, --num_epochs N." in text


UNITS = {
    "max_duration": ["steps", "samples", "tokens", "epochs", "tokens per parameter"],
    "warmup": ["steps", "samples", "tokens"],
    "decay": ["steps", "tokens"],
    "eval_interval": ["steps", "tokens", "epochs"],
    "save_interval": ["steps", "tokens", "epochs"],
}


def test_each_duration_of_the_trainer_takes_these_units():
    durations = {f.name: [*f.option.units] for f in fields(GPTConfig) if f.option.units}
    assert durations == UNITS


@pytest.mark.parametrize(
    ("words", "name", "duration"),
    [
        (["--max_train_steps", "600"], "max_duration", "600 steps"),
        (["--max_train_samples", "600"], "max_duration", "600 samples"),
        (["--max_train_tokens", "10M"], "max_duration", "10000000 tokens"),
        (["--num_train_epochs", "1"], "max_duration", "1 epoch"),
        (["--tokens_per_parameter", "20"], "max_duration", "20 tokens per parameter"),
        (["--num_warmup_steps", "20"], "warmup", "20 steps"),
        (["--num_warmup_samples", "20"], "warmup", "20 samples"),
        (["--num_warmup_tokens", "1M"], "warmup", "1000000 tokens"),
        (["--num_decay_steps", "20"], "decay", "20 steps"),
        (["--num_decay_tokens", "1M"], "decay", "1000000 tokens"),
        (["--eval_steps", "20"], "eval_interval", "20 steps"),
        (["--eval_tokens", "1M"], "eval_interval", "1000000 tokens"),
        (["--checkpointing_steps", "20"], "save_interval", "20 steps"),
        (["--checkpointing_steps", "epoch"], "save_interval", "1 epoch"),
        (["--checkpointing_tokens", "1M"], "save_interval", "1000000 tokens"),
    ],
)
def test_the_former_options_are_aliases(words, name, duration):
    decays = ("--lr_scheduler_type", "warmup_stable_decay")
    assert getattr(parse_args([*ENOUGH, *decays, *words]), name) == duration
    assert getattr(parse_args([*ENOUGH, *decays, f"--{name}", duration]), name) == duration
