"""Files that exist already where `prepare` writes: what it replaces, and what it leaves alone."""

from pathlib import Path

import pytest

from llm.prepare.prepare import main
from tests.support.texts import content, json_lines, write

pytestmark = pytest.mark.usefixtures("at_home")


def prepare(*argv):
    return main(["--tokenizer_name", "tokenizer", *map(str, argv)])


def nanogpt(*argv, percentage=0):
    return prepare(
        *("--input", "a.jsonl", "--format", "nanogpt", "--output_prefix", "owt"),
        *("--validation_split_percentage", percentage, *argv),
    )


@pytest.fixture
def owt(tmp_path):
    """A folder for nanoGPT's files, beside a text."""
    write(tmp_path / "a.jsonl", json_lines(["one", "two", "three", "four"]))
    (tmp_path / "owt").mkdir()
    return tmp_path / "owt"


@pytest.mark.parametrize("overwrite", [[], ["--overwrite"]])
@pytest.mark.parametrize(
    ("text", "argv", "replaced"),
    [
        ("owt/train.json", ["--format", "nanogpt", "--output_prefix", "owt"], "owt/train.json"),
        ("owt/val.json", ["--format", "nanogpt", "--output_prefix", "./owt"], "owt/val.json"),
        ("x_text_document.json", ["--output_prefix", "x"], "x_text_document.json"),
        ("link.json", ["--output_prefix", "x"], "x_text_document.json"),
        (
            "owt.parts/000000.json",
            ["--format", "nanogpt", "--output_prefix", "owt"],
            "owt.parts",
        ),
    ],
)
def test_no_output_replaces_an_input(tmp_path, capsys, owt, text, argv, replaced, overwrite):
    (tmp_path / "owt.parts").mkdir()
    path = tmp_path / ("x_text_document.json" if text == "link.json" else text)
    before = write(path, json_lines(["one", "two", "three", "four"])).read_bytes()
    if text == "link.json":
        (tmp_path / text).symlink_to(path)

    assert prepare("--input", text, *argv, *overwrite) == 2

    assert capsys.readouterr().err == (
        f"error: {replaced} would be replaced, and the input {text} with it; choose another "
        "--output_prefix.\n"
    )
    assert path.read_bytes() == before


def test_no_output_replaces_the_vocabulary_that_it_is_encoded_with(tmp_path, capsys, owt):
    write(owt / "train.json", "{}")
    write(tmp_path / "merges.txt", "")

    argv = ["--input", "a.jsonl", "--vocab_file", "owt/train.json", "--merges_file", "merges.txt"]

    assert main([*argv, "--format", "nanogpt", "--output_prefix", "owt", "--overwrite"]) == 2
    assert "and the input owt/train.json with it" in capsys.readouterr().err


NO_VALIDATION = "exists, and --validation_split_percentage 0 writes no validation"


@pytest.mark.parametrize("overwrite", [[], ["--overwrite"]])
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("owt/train.json", "would be replaced, and it describes no token file; move it away"),
        ("owt/train.idx", "belongs to token files of another format"),
        ("owt/val.bin", NO_VALIDATION),
        ("owt/val.json", NO_VALIDATION),
        ("owt.parts/000000.json", "is in a folder for unfinished work but does not belong to it"),
    ],
)
def test_a_file_of_others_is_left_alone(capsys, owt, name, said, overwrite):
    path = Path(name)
    path.parent.mkdir(exist_ok=True)
    before = write(path, json_lines(["the only copy"])).read_bytes()

    assert nanogpt(*overwrite) == 2

    error = capsys.readouterr().err
    assert f"error: {name} {said}" in error
    assert "move it away" in error
    assert "pass --overwrite" not in error
    assert content(path.parent) == {path.name: before}


@pytest.mark.parametrize("place", ["owt/train.bin", "owt/train.json"])
def test_a_folder_in_the_place_of_a_file_is_refused_before_the_work(capsys, tmp_path, owt, place):
    (tmp_path / place).mkdir()

    assert nanogpt("--overwrite") == 2

    assert f"error: {place} is a folder, and a file is to be" in capsys.readouterr().err


def test_a_file_in_the_place_of_the_folder_is_refused_before_the_work(capsys, tmp_path, owt):
    owt.rmdir()
    write(tmp_path / "owt", "precious")

    assert nanogpt("--overwrite") == 2

    assert "error: owt is a file, and --format nanogpt needs a folder" in capsys.readouterr().err


def test_former_validation_text_is_removed_with_overwrite_alone(capsys, owt):
    nanogpt(percentage=50)

    assert nanogpt() == 2
    assert "owt/train.json exists already" in capsys.readouterr().err
    (owt / "train.bin").unlink()
    (owt / "train.json").unlink()
    assert nanogpt() == 2
    assert "or pass --overwrite to remove the file." in capsys.readouterr().err
    assert sorted(content(owt)) == ["val.bin", "val.json"]

    assert nanogpt("--overwrite") == 0
    assert sorted(content(owt)) == ["train.bin", "train.json"]
    assert "removing owt/val.bin: its documents are in train.bin now" in capsys.readouterr().out


def test_validation_text_that_has_changed_since_is_left_alone(capsys, owt):
    nanogpt(percentage=50)
    changed = (owt / "val.bin").read_bytes()[::-1]
    write(owt / "val.bin", changed)

    assert nanogpt("--overwrite") == 2

    assert "since no val.json shows that this program wrote it" in capsys.readouterr().err
    assert (owt / "val.bin").read_bytes() == changed


def test_validation_text_beside_finished_training_text_is_left_alone(capsys, owt):
    nanogpt()
    write(owt / "val.bin", b"precious")

    assert nanogpt() == 0

    assert "owt/train.bin already exists, made with the same options" in capsys.readouterr().out
    assert (owt / "val.bin").read_bytes() == b"precious"
