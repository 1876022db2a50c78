"""Numbers of tokens with a suffix, on the command line and in TOML files."""

from dataclasses import dataclass

import pytest

from llm.config.command_line import parse_options
from llm.config.duration import Tokens
from llm.config.options import option
from llm.config.toml import read_toml, to_toml
from llm.errors import ConfigError


@dataclass(kw_only=True)
class Options:
    budget: Tokens | None = option(None, "The budget.", group="Length", above=0)


def read(*words: str) -> Options:
    return parse_options(Options, words, prog="train", description="Trains.")


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("20B", 20_000_000_000),
        ("0.3b", 300_000_000),
        ("1.5M", 1_500_000),
        ("2K", 2_000),
        ("1T", 10**12),
        ("4096", 4096),
        ("1_000_000", 1_000_000),
    ],
)
def test_a_number_of_tokens_may_have_a_suffix(text, number):
    assert read("--budget", text).budget == number


@pytest.mark.parametrize("text", ["20G", "many", "1.5", "-3B", "0.0001K", ""])
def test_text_that_is_not_a_number_of_tokens_is_refused_by_name(text):
    with pytest.raises(ConfigError, match=r"--budget expects a number of tokens such as 500M"):
        read(f"--budget={text}")


def test_a_toml_file_may_have_a_suffix_and_is_written_as_a_number(tmp_path):
    path = tmp_path / "options.toml"
    path.write_text('budget = "20B"')
    options = Options(**read_toml(Options, path))
    assert options.budget == 20_000_000_000
    assert "budget = 20000000000" in to_toml(options)


def test_a_toml_file_with_another_text_is_refused(tmp_path):
    path = tmp_path / "options.toml"
    path.write_text('budget = "lots"')
    with pytest.raises(ConfigError, match="a number of tokens such as 500M"):
        read_toml(Options, path)
