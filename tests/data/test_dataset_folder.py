"""Which files of a local folder under --dataset_name belong to which split."""

import logging
import os

import pytest

from llm.data.dataset_folder import open_dataset_folder
from llm.errors import DataError
from tests.support.texts import write

RECORD = '{"text": "one"}\n'


def fill(folder, *names):
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        write(path, RECORD)


def splits(name, config=None):
    """The names of the files of each split, relative to the folder."""
    folder = open_dataset_folder(str(name), config, file_option="--train_file")
    return {
        split: [os.path.relpath(path, name) for path in files]
        for split, files in folder.splits.items()
    }


@pytest.fixture(autouse=True)
def log(caplog):
    caplog.set_level(logging.INFO, "llm.data")
    return caplog


def test_a_folder_without_names_of_splits_is_all_for_training(tmp_path, caplog):
    fill(tmp_path, "books.jsonl", "unit-test-code.jsonl", "deep/er/web.csv.gz", "0.parquet")

    assert splits(tmp_path) == {
        "train": ["0.parquet", "books.jsonl", "deep/er/web.csv.gz", "unit-test-code.jsonl"]
    }
    assert caplog.messages == [
        f"--dataset_name {tmp_path}: train is 4 files, since no name of a file or folder tells a "
        "split"
    ]


@pytest.mark.parametrize(
    ("train", "validation"),
    [
        ("train.jsonl", "validation.jsonl"),
        ("train/00.jsonl.zst", "val.jsonl.zst"),
        ("data/train-00000-of-00001-a09b74b3ef9c3b56.parquet", "data/dev-00000-of-00001.parquet"),
        ("c4-train.00000-of-01024.json.gz", "c4-validation.00000-of-00008.json.gz"),
        ("TinyStoriesV2-GPT4-train.txt", "TinyStoriesV2-GPT4-valid.txt"),
        ("Training_set/a.csv", "validation_set/a.csv"),
        ("en/train_part_3.jsonl", "en/validation1.jsonl"),
    ],
)
def test_names_of_files_or_folders_tell_the_splits(tmp_path, caplog, train, validation):
    fill(tmp_path, train, validation, "test/a.jsonl")

    assert splits(tmp_path) == {
        "train": [train],
        "validation": [validation],
        "test": ["test/a.jsonl"],
    }
    assert caplog.messages[-1].endswith(
        ": train is 1 file, validation is 1 file, test is 1 file, as the names of files or folders "
        "tell"
    )


def test_a_name_like_a_split_beside_other_names_is_refused(tmp_path):
    fill(tmp_path, "train.jsonl", "wiki.jsonl")

    with pytest.raises(
        DataError,
        match=r"/train\.jsonl is named like the split train, and .*/wiki\.jsonl like none; move "
        r"the files of each split into a folder train, validation or test, or name the file to "
        r"read with --train_file\.$",
    ):
        splits(tmp_path)


def test_a_file_of_two_splits_is_refused(tmp_path):
    fill(tmp_path, "dev/train.jsonl")

    with pytest.raises(DataError, match=r"dev/train\.jsonl is named like the splits validation an"):
        splits(tmp_path)


def test_a_split_that_does_not_exist_is_refused_with_the_others(tmp_path):
    fill(tmp_path, "test.jsonl")
    folder = open_dataset_folder(str(tmp_path), None, file_option="--input")

    with pytest.raises(DataError, match=r"has no split 'train', only: test\.$"):
        folder.list_files("train")


def test_files_that_are_not_read_are_named_with_the_reason(tmp_path, caplog):
    fill(tmp_path, "a.jsonl", "b.jsonl", "LICENSE.txt", "README.md", "readme.txt", ".git/HEAD")
    fill(tmp_path, "dataset_infos.json", "1.pdf", "2.pdf", "3.arrow", "4.zip", "5.tsv")

    assert splits(tmp_path) == {"train": ["a.jsonl", "b.jsonl"]}
    assert caplog.messages[0] == (
        f"--dataset_name {tmp_path}: 10 of 12 files are left out: .git/HEAD (hidden), "
        "1.pdf, 2.pdf, 3.arrow and 2 more (not a known kind of text), "
        "LICENSE.txt, README.md, dataset_infos.json and 1 more (documentation)"
    )


def test_a_folder_without_text_is_refused(tmp_path):
    fill(tmp_path, "a.arrow")

    with pytest.raises(DataError, match=r"is a folder without any file of a known kind: \.txt, "):
        splits(tmp_path)


def test_a_file_that_is_linked_twice_is_refused(tmp_path):
    fill(tmp_path, "a.jsonl")
    (tmp_path / "b.jsonl").symlink_to("a.jsonl")

    with pytest.raises(DataError, match=r"--dataset_name names .*b\.jsonl twice"):
        splits(tmp_path)


@pytest.mark.parametrize("name", ["text", "./text", "text/", "json", "arrow", "csv", "parquet"])
def test_a_folder_named_as_a_format_of_the_library_is_read_alone(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    fill(tmp_path / name, "a.jsonl")
    fill(tmp_path, "notes/b.jsonl")

    assert splits(name) == {"train": ["a.jsonl"]}


def test_a_path_that_is_no_folder_is_refused(tmp_path):
    fill(tmp_path, "a.txt")

    for name, message in {
        str(tmp_path / "none"): "does not exist",
        "./none": "does not exist",
        str(tmp_path / "a.txt"): r"a\.txt is a file; name it with --train_file\.",
        "": "--dataset_name is empty",
    }.items():
        with pytest.raises(DataError, match=message):
            open_dataset_folder(name, None, file_option="--train_file")


def test_a_name_on_the_hub_and_a_saved_data_set_are_left_to_the_library(tmp_path):
    fill(tmp_path, "saved/state.json", "sets/small/dataset_dict.json")

    for name, config in (
        ("wikitext", "small"),
        (tmp_path / "saved", None),
        (tmp_path / "sets", "small"),
    ):
        assert open_dataset_folder(str(name), config, file_option="--input") is None


# Configurations


CARD = """---
license: mit
configs:
- config_name: en
  data_files:
  - split: train
    path: ["en/part-*", en/extra.jsonl]
  - split: heldout
    path: en/valid.jsonl
- config_name: de
  data_files: "de/*"
- config_name: fr
  data_dir: fr
---
# A data set
"""


@pytest.fixture
def with_card(tmp_path):
    fill(tmp_path, "en/part-1.jsonl", "en/part-0.jsonl", "en/extra.jsonl", "en/valid.jsonl")
    fill(tmp_path, "de/a.jsonl", "de/b.jsonl", "fr/train.jsonl", "fr/dev.jsonl")
    write(tmp_path / "README.md", CARD)
    return tmp_path


def test_the_card_tells_the_files_of_each_configuration(with_card, caplog):
    assert splits(with_card, "en") == {
        "train": ["en/part-0.jsonl", "en/part-1.jsonl", "en/extra.jsonl"],
        "heldout": ["en/valid.jsonl"],
    }
    assert (
        "README.md does not list 4 text files for this configuration, such as "
        f"{with_card}/de/a.jsonl" in caplog.text
    )
    assert splits(with_card, "de") == {"train": ["de/a.jsonl", "de/b.jsonl"]}
    assert splits(with_card, "fr") == {"train": ["fr/train.jsonl"], "validation": ["fr/dev.jsonl"]}


def test_an_unknown_or_missing_configuration_is_refused_with_the_others(with_card):
    for config, lack in {"nl": "no 'nl'", None: "several configurations"}.items():
        with pytest.raises(
            DataError, match=f"has {lack}; .*--dataset_config_name from: 'en', 'de', 'fr'"
        ):
            splits(with_card, config)


@pytest.mark.parametrize("mark", ["config_name: default", "config_name: de\n  default: true"])
def test_the_default_configuration_needs_no_name(with_card, mark):
    write(with_card / "README.md", CARD.replace("config_name: de", mark))

    assert splits(with_card) == {"train": ["de/a.jsonl", "de/b.jsonl"]}


@pytest.mark.parametrize(
    ("card", "message"),
    [
        ("---\nconfigs: [\n---\n", r"the metadata at the top of README\.md cannot be read"),
        ("---\nconfigs: 5\n---\n", r"the field configs of README\.md has a form .*\(5\)"),
        ("---\nconfigs: [{data_files: a}]\n---\n", "the field configs of README"),
        (CARD.replace("de/*", "../*.csv"), r"README\.md names \.\./\*\.csv, which is outside of"),
        (CARD.replace("de/*", "/etc/*.csv"), r"README\.md names /etc/\*\.csv, which is outside of"),
        (
            CARD.replace('"de/*"', "x\n  data_dir: .."),
            r"README\.md names \.\., which is outside of",
        ),
        (CARD.replace('"de/*"', "{train: 5}"), r"the field data_files of README\.md has a form"),
        (
            CARD.replace("de/*", "de/*.csv"),
            r"README\.md names de/\*\.csv, which matches no file; download",
        ),
    ],
)
def test_a_card_that_cannot_be_used_is_refused(with_card, card, message):
    write(with_card / "README.md", card)

    with pytest.raises(DataError, match=message):
        splits(with_card, "de")


def test_a_readme_without_configurations_is_ignored(with_card):
    for readme in ("# A data set\n", "---\nlicense: mit\n---\n", b"in Latin-1: \xe9\n"):
        write(with_card / "README.md", readme)
        assert splits(with_card, "de") == {"train": ["de/a.jsonl", "de/b.jsonl"]}


def test_without_a_card_a_configuration_is_a_folder_or_refused(tmp_path):
    fill(tmp_path, "small/train.jsonl", "large/train.jsonl")

    assert splits(tmp_path, "small") == {"train": ["small/train.jsonl"]}
    assert splits(tmp_path, "default") == {"train": ["large/train.jsonl", "small/train.jsonl"]}
    with pytest.raises(
        DataError,
        match=r"has no configuration 'tiny': neither its README\.md nor a folder has this name\. "
        "Leave --dataset_config_name out to read the whole folder",
    ):
        splits(tmp_path, "tiny")
