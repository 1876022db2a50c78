import os
import sys

import datasets
import pytest

from llm.data.sources import dataset_sources, file_source
from llm.errors import DataError


def source(path, **changes):
    settings = {"text_column": None, "keep_linebreaks": True}
    return file_source(path, **{**settings, **changes})


def splits(name, config=None, **changes):
    settings = {"text_column": None, "trust_remote_code": False}
    return dataset_sources(str(name), config, **{**settings, **changes})


@pytest.fixture(autouse=True)
def library_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("hf"))


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "train.jsonl").write_text('{"text": "one"}\n{"text": null}\n{"text": "two"}\n')
    (folder / "validation.jsonl").write_text('{"text": "three"}\n')
    return folder


def test_files_that_cannot_be_read_are_refused_before_anything_is_read(tmp_path):
    (tmp_path / "a.pdf").write_text("x")
    (tmp_path / "empty.txt").touch()

    for path, message in {
        tmp_path / "none.txt": r"--train_file .*none\.txt does not exist",
        tmp_path: "is no file; for a folder of files use --dataset_name",
        tmp_path / "a.pdf": r"unknown kind; give one of \.txt, \.csv, \.json, \.jsonl, \.parquet",
        tmp_path / "empty.txt": r"empty\.txt is empty",
    }.items():
        with pytest.raises(DataError, match=message):
            source(path)
    with pytest.raises(DataError, match="--validation_file"):
        source(tmp_path / "none.txt", option="--validation_file")


def test_a_file_is_told_by_path_size_time_and_what_changes_its_rows(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("one\n")
    before = source(path).identity()

    assert source(path).identity() == before
    assert source(path, text_column="body").identity() == before  # a text file has no columns
    assert source(path, keep_linebreaks=False).identity() != before
    os.utime(path, ns=(0, 0))
    assert source(path).identity() != before
    assert source(path).num_bytes == 4


def test_a_relative_path_is_told_from_the_same_one_elsewhere(tmp_path, monkeypatch):
    identities = []
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        (tmp_path / name / "a.txt").write_text("one\n")
        os.utime("a.txt", ns=(0, 0))
        identities.append(source("a.txt").identity())

    assert identities[0] != identities[1]


def test_a_folder_of_files_has_splits_whose_records_are_documents(folder):
    found = splits(folder)

    assert found["validation"].exists()
    assert list(found["train"].rows()) == [("one", True), ("", True), ("two", True)]
    assert list(found["validation"].rows()) == [("three", True)]


def test_a_saved_data_set_is_read_and_its_configuration_not_asked_for(folder, tmp_path):
    datasets.load_dataset(str(folder)).save_to_disk(tmp_path / "saved")

    found = splits(tmp_path / "saved", "wikitext-2-raw-v1")

    assert list(found["validation"].rows()) == [("three", True)]


def test_a_saved_single_split_is_the_training_text(folder, tmp_path):
    datasets.load_dataset(str(folder), split="train").save_to_disk(tmp_path / "saved")

    found = splits(tmp_path / "saved")

    assert len(list(found["train"].rows())) == 3
    assert not found["validation"].exists()


def test_a_folder_without_configurations_stands_in_for_one_that_has(folder, caplog):
    found = splits(folder, "wikitext-2-raw-v1")

    assert len(list(found["train"].rows())) == 3
    assert "has no configurations" in caplog.text


def test_a_configuration_may_be_a_folder_of_its_own(folder, tmp_path):
    (tmp_path / "set").mkdir()
    folder.rename(tmp_path / "set" / "small")

    assert len(list(splits(tmp_path / "set", "small")["train"].rows())) == 3


def test_a_missing_configuration_is_refused_with_a_list_of_those_there_are(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "train.txt").write_text("x\n")
    configs = "".join(f"- config_name: {name}\n  data_files: {name}/*\n" for name in ("a", "b"))
    (tmp_path / "README.md").write_text(f"---\nconfigs:\n{configs}---\n")

    for config, lack in {"c": "no 'c'", None: "several configurations"}.items():
        with pytest.raises(DataError, match=f"has {lack}; .*--dataset_config_name from: 'a', 'b'"):
            splits(tmp_path, config)["train"].exists()


def test_a_data_set_without_a_train_split_is_refused_with_a_list_of_its_splits(tmp_path):
    (tmp_path / "test.jsonl").write_text('{"text": "x"}\n')

    with pytest.raises(DataError, match="no split 'train', only: test"):
        list(splits(tmp_path)["train"].rows())


def test_a_missing_column_of_a_data_set_is_refused_with_a_list(folder):
    with pytest.raises(DataError, match="no column 'body'; choose one with --text_column from"):
        list(splits(folder, text_column="body")["train"].rows())


def test_a_broken_or_empty_folder_is_refused_in_one_sentence(tmp_path):
    with pytest.raises(DataError, match=r"cannot be read: .*doesn't contain any data files"):
        splits(tmp_path)["train"].exists()
    (tmp_path / "train.jsonl").write_text('{"text": "a"}\n{"text":\n')
    with pytest.raises(DataError, match=r"--dataset_name .* cannot be read"):
        splits(tmp_path)["train"].exists()


def test_a_name_that_the_hub_does_not_answer_to_is_refused_with_the_way_out(monkeypatch):
    def unreachable(*_, **__):
        raise ConnectionError("Couldn't reach 'wikitext' on the Hub\nand more")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)

    with pytest.raises(
        DataError,
        match=r"--dataset_name wikitext cannot .* \(Couldn't reach 'wikitext' on the Hub\); "
        "check the name and the connection, or name a local folder",
    ):
        splits("wikitext", "wikitext-2-raw-v1")["train"].exists()


def test_a_path_without_a_folder_does_not_ask_the_hub(tmp_path):
    with pytest.raises(DataError, match="does not exist"):
        splits(tmp_path / "none")
    with pytest.raises(DataError, match="does not exist"):
        splits("./none")
    (tmp_path / "a.txt").write_text("x\n")
    with pytest.raises(DataError, match="name it with --train_file"):
        splits(tmp_path / "a.txt")


def test_a_data_set_is_told_without_the_library(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)  # importing it now fails

    before = splits(folder)["train"].identity()

    assert splits(folder)["validation"].identity() != before
    assert (
        splits("wikitext", "a")["train"].identity() != splits("wikitext", "b")["train"].identity()
    )
    (folder / "train.jsonl").write_text('{"text": "longer than before"}\n')
    assert splits(folder)["train"].identity() != before


def test_the_progress_bars_of_the_library_are_given_back(folder):
    datasets.enable_progress_bars()

    splits(folder)["train"].exists()

    assert datasets.is_progress_bar_enabled()
