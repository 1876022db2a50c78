"""An option whose values are tables of the TOML file."""

from dataclasses import dataclass
from pathlib import Path

import pytest

from llm.config.command_line import parse_options
from llm.config.duration import Tokens
from llm.config.options import option, path_options
from llm.config.toml import read_toml, to_toml
from llm.errors import ConfigError
from tests.support.programs import option_list


@dataclass(frozen=True, kw_only=True)
class Room:
    until: Tokens | None = option(None, "Until.", group="Room")
    text: tuple[float | str, ...] = option((), "Text.", group="Room", path=True)


@dataclass(frozen=True, kw_only=True)
class House:
    rooms: tuple[Room, ...] = option((), "Tables [[rooms]].", group="House")
    name: str = option("home", "Name.", group="House")
    colors: str | None = option(None, "JSON.", group="House", json=True)


def read(folder: Path, text: str, *words: str) -> House:
    file = folder / "house.toml"
    file.write_text(text)
    return parse_options(House, ["--config", str(file), *words], prog="house", description="")


TEXT = """
name = "hut"
[[rooms]]
until = "1.5K"
text = [0.5, "a", 1, "b"]
[[rooms]]
text = ["c"]
"""
ROOMS = (Room(until=Tokens(1500), text=(0.5, "a", 1.0, "b")), Room(text=("c",)))


def test_tables_are_read_in_their_order(tmp_path):
    assert read(tmp_path, TEXT) == House(name="hut", rooms=ROOMS)
    assert read(tmp_path, '[rooms]\ntext = "c"').rooms == ROOMS[1:]
    assert read(tmp_path, 'rooms = [{ text = ["c"] }]\nname = "x"').rooms == ROOMS[1:]


def test_tables_are_recorded_and_read_back(tmp_path):
    house = House(rooms=ROOMS)
    text = to_toml(house)
    assert 'rooms = [{until = 1500, text = [0.5, "a", 1.0, "b"]}, {text = ["c"]}]' in text
    assert read(tmp_path, text) == house
    assert read(tmp_path, to_toml(House())) == House()


def test_a_table_for_an_option_in_json_is_its_string(tmp_path):
    house = House(colors='{"walls": ["red", 0.5], "door": {"open": true}}')
    text = 'colors = { walls = ["red", 0.5], door = { open = true } }'
    assert read(tmp_path, text) == house
    assert read(tmp_path, '[colors]\nwalls = ["red", 0.5]\ndoor.open = true') == house
    assert read(tmp_path, to_toml(house)) == house
    assert to_toml(read(tmp_path, text)) == to_toml(house)


def test_the_paths_in_tables_are_paths_of_their_option():
    assert path_options(House(rooms=ROOMS)) == [("rooms", "a"), ("rooms", "b"), ("rooms", "c")]
    assert "- **`rooms`**: Tables [[rooms]]." in option_list(House)


def test_as_a_flag_tables_can_only_be_left_out(tmp_path, capsys):
    assert read(tmp_path, TEXT, "--rooms", "none").rooms == ()
    with pytest.raises(ConfigError, match=r"--rooms expects a list, each item a table \[\[ro"):
        read(tmp_path, TEXT, "--rooms", "c")
    with pytest.raises(SystemExit):
        parse_options(House, ["--help"], prog="house", description="")
    assert "--rooms none " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("colors = 5", ["house.toml: colors expects a string or a table, not 5"]),
        ("colors = { day = 2026-11-29 }", ["house.toml: colors has a date or a time, which JSON"]),
        ("name = { first = 1 }", ["house.toml: name expects a string, not {'first': 1}"]),
        ("rooms = 5", ["house.toml: rooms expects a table [[rooms]]", "not 5"]),
        (
            "[[rooms]]\nuntilx = 5",
            ["rooms 1: There is no option untilx; did you mean until"],
        ),
        ("[[rooms]]\n[[rooms]]\nuntil = 'x'", ["house.toml: rooms 2: until expects a number of"]),
    ],
)
def test_a_wrong_table_is_refused_with_its_number_and_key(tmp_path, text, words):
    with pytest.raises(ConfigError) as refusal:
        read_toml(House, write(tmp_path, text))
    for word in words:
        assert word in str(refusal.value)


def write(folder: Path, text: str) -> Path:
    file = folder / "house.toml"
    file.write_text(text)
    return file
