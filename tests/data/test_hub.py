import os
import sys

import datasets
import pytest

from llm.data.text.blocks import BadRecordPolicy
from llm.data.text.hub import dataset_sources
from llm.data.text.sources import check_unchanged
from llm.errors import DataError
from tests.support.corpora import texts_of, write


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
    write(folder / "train.jsonl", '{"text": "one"}\n{"text": null}\n{"text": "two"}\n')
    write(folder / "validation.jsonl", '{"text": "three"}\n')
    return folder


@pytest.fixture
def shards(tmp_path):
    """A training split of three files with ten records each."""
    folder = tmp_path / "shards"
    folder.mkdir()
    for shard in range(3):
        lines = "".join(f'{{"id": {row}, "text": "{shard}.{row}"}}\n' for row in range(10))
        write(folder / f"train-{shard}.jsonl", lines)
    return folder


SHARD_TEXTS = [f"{shard}.{row}" for shard in range(3) for row in range(10)]


@pytest.mark.parametrize("streaming", [False, True])
def test_a_folder_of_files_has_splits_whose_records_are_documents(folder, streaming):
    found = splits(folder, streaming=streaming)

    assert found["validation"].exists()
    assert texts_of(found["train"]) == ["one", "", "two"]
    assert texts_of(found["validation"]) == ["three"]
    assert not found["train"].one_document


@pytest.mark.parametrize("name", ["text", "./text", "text/", "json", "arrow", "csv", "parquet"])
def test_a_folder_named_as_a_builder_of_the_library_is_read_alone(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).mkdir()
    (tmp_path / "notes").mkdir()
    write(tmp_path / name / "a.jsonl", '{"text": "public"}\n')
    write(tmp_path / "notes" / "b.jsonl", '{"text": "private"}\n')

    assert texts_of(splits(name)["train"]) == ["public"]


@pytest.mark.parametrize("name", ["text", "json"])
def test_the_name_of_a_builder_without_such_a_folder_is_refused(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "b.txt", "private")

    with pytest.raises(DataError, match=f"--dataset_name {name} is a file format of the `data"):
        splits(name)["train"].exists()


def test_a_saved_data_set_is_read_without_configuration_and_says_so(folder, tmp_path, caplog):
    datasets.load_dataset(str(folder)).save_to_disk(tmp_path / "saved")

    found = splits(tmp_path / "saved", "wikitext-2-raw-v1")

    assert texts_of(found["validation"]) == ["three"]
    assert (
        "--dataset_config_name wikitext-2-raw-v1 has no effect: save_to_disk wrote" in caplog.text
    )
    (part,) = splits(tmp_path / "saved", streaming=True)["train"].split(1)
    assert texts_of(part) == ["one", "", "two"]  # from the disk all the same


def test_a_saved_single_split_is_the_training_text(folder, tmp_path):
    datasets.load_dataset(str(folder), split="train").save_to_disk(tmp_path / "saved")

    found = splits(tmp_path / "saved")

    assert len(texts_of(found["train"])) == 3
    assert not found["validation"].exists()


def test_a_local_folder_without_configurations_ignores_the_name_of_one(folder, caplog):
    found = splits(folder, "wikitext-2-raw-v1")

    assert len(texts_of(found["train"])) == 3
    assert "has no configurations" in caplog.text


def test_a_configuration_may_be_a_separate_folder(folder, tmp_path):
    (tmp_path / "set").mkdir()
    folder.rename(tmp_path / "set" / "small")

    assert len(texts_of(splits(tmp_path / "set", "small")["train"])) == 3


def test_a_missing_configuration_is_refused_with_a_list_of_the_others(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        write(tmp_path / name / "train.txt", "x\n")
    configs = "".join(f"- config_name: {name}\n  data_files: {name}/*\n" for name in ("a", "b"))
    write(tmp_path / "README.md", f"---\nconfigs:\n{configs}---\n")

    for config, lack in {"c": "no 'c'", None: "several configurations"}.items():
        with pytest.raises(DataError, match=f"has {lack}; .*--dataset_config_name from: 'a', 'b'"):
            splits(tmp_path, config)["train"].exists()


def test_a_data_set_without_a_train_split_is_refused_with_its_splits(tmp_path):
    write(tmp_path / "test.jsonl", '{"text": "x"}\n')

    for streaming in (False, True):
        with pytest.raises(DataError, match="no split 'train', only: test"):
            texts_of(splits(tmp_path, streaming=streaming)["train"])


@pytest.mark.parametrize("streaming", [False, True])
def test_a_missing_column_of_a_data_set_is_refused_with_a_list(folder, streaming):
    with pytest.raises(DataError, match="no column 'body'; choose one with --text_column from"):
        texts_of(splits(folder, text_column="body", streaming=streaming)["train"])


@pytest.mark.parametrize("streaming", [False, True])
def test_a_data_set_without_a_text_column_gives_its_only_string_column(tmp_path, streaming):
    write(tmp_path / "train.jsonl", '{"id": 1, "body": "one"}\n')
    write(tmp_path / "validation.jsonl", '{"id": 2, "body": "two"}\n')
    assert texts_of(splits(tmp_path, streaming=streaming)["train"]) == ["one"]

    for name in ("train", "validation"):
        write(tmp_path / f"{name}.jsonl", '{"id": 1, "body": "one", "title": "two"}\n')
    with pytest.raises(DataError, match="--text_column from: body, title"):
        texts_of(splits(tmp_path, streaming=streaming)["train"])


def test_a_broken_or_empty_folder_is_refused_in_one_sentence(tmp_path):
    with pytest.raises(DataError, match=r"cannot be read: .*doesn't contain any data files"):
        splits(tmp_path)["train"].exists()
    write(tmp_path / "train.jsonl", '{"text": "a"}\n{"text":\n')
    with pytest.raises(DataError, match=r"--dataset_name .* cannot be read"):
        splits(tmp_path)["train"].exists()
    with pytest.raises(DataError, match=r"--dataset_name .* cannot be read"):
        texts_of(splits(tmp_path, streaming=True)["train"])


def test_a_name_that_the_hub_does_not_know_is_refused_with_a_remedy(hub):
    with pytest.raises(
        DataError,
        match=r"--dataset_name me/none cannot .*\(.*'me/none' .*\); "
        "check the name and the connection, or name a local folder",
    ):
        splits("me/none", "wikitext-2-raw-v1")["train"].exists()


def test_a_stream_that_breaks_off_is_reported_in_one_sentence(monkeypatch):
    def rows():
        yield {"text": "one"}
        raise ConnectionError("the network is gone")

    stream = datasets.IterableDataset.from_generator(rows)
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: {"train": stream})

    with pytest.raises(DataError, match=r"--dataset_name far/away cannot be loaded .*network is"):
        texts_of(splits("far/away", streaming=True)["train"])


def test_a_path_without_a_folder_does_not_ask_the_hub(tmp_path):
    with pytest.raises(DataError, match="does not exist"):
        splits(tmp_path / "none")
    with pytest.raises(DataError, match="does not exist"):
        splits("./none")
    write(tmp_path / "a.txt", "x\n")
    with pytest.raises(DataError, match=r"a\.txt is a file; name it with --train_file\."):
        splits(tmp_path / "a.txt")
    with pytest.raises(DataError, match=r"a\.txt is a file; name it with --input\."):
        splits(tmp_path / "a.txt", file_option="--input")
    with pytest.raises(DataError, match="--dataset_name is empty"):
        splits("")


def test_the_identity_of_a_data_set_needs_no_library(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)  # importing it now fails

    before = splits(folder)["train"].identity()

    assert splits(folder)["validation"].identity() != before
    assert (
        splits("wikitext", "a")["train"].identity() != splits("wikitext", "b")["train"].identity()
    )
    write(folder / "train.jsonl", '{"text": "longer than before"}\n')
    assert splits(folder)["train"].identity() != before


def test_the_identity_of_a_data_set_includes_the_times_of_its_files(folder):
    found = splits(folder)["train"]
    before = found.identity()
    check_unchanged([found])

    os.utime(folder / "train.jsonl", ns=(0, 0))

    assert splits(folder)["train"].identity() != before
    assert found.identity() == before
    with pytest.raises(DataError, match=r"train\.jsonl has changed while the text was prepared"):
        check_unchanged([found])


def test_a_broken_link_in_a_folder_is_refused(folder):
    (folder / "more.jsonl").symlink_to("nothing")

    with pytest.raises(DataError, match=r"--dataset_name .*/more\.jsonl is a broken link; re"):
        splits(folder)


@pytest.mark.parametrize("rows", [7, 10, 100])
def test_the_chunks_of_a_data_set_are_its_rows_in_order(shards, monkeypatch, rows):
    monkeypatch.setattr("llm.data.text.hub._CHUNK_ROWS", rows)

    parts = splits(shards)["train"].split(1)

    assert len(parts) == -(-30 // rows)
    assert [text for part in parts for text in texts_of(part)] == SHARD_TEXTS


def test_the_chunks_of_a_stream_are_its_files_in_order(shards):
    parts = splits(shards, streaming=True)["train"].split(1)

    assert [texts_of(part) for part in parts] == [SHARD_TEXTS[i : i + 10] for i in (0, 10, 20)]


def test_a_wrong_row_is_counted_from_the_beginning_of_the_data_set(shards, monkeypatch):
    monkeypatch.setattr("llm.data.text.hub._CHUNK_ROWS", 20)
    parts = splits(shards, text_column="id")["train"].split(1)

    with pytest.raises(DataError, match=r"\[train\], row 21: the text is a value of type int"):
        texts_of(parts[1])
    faults = BadRecordPolicy("skip")
    assert texts_of(parts[1], faults) == []
    assert faults.skipped == 10


def test_a_wrong_row_of_a_stream_is_named_with_its_shard(shards):
    parts = splits(shards, text_column="id", streaming=True)["train"].split(1)

    with pytest.raises(DataError, match=r"\[train\], shard 3, row 1: the text is a value of type"):
        texts_of(parts[2])


def test_the_progress_bars_of_the_library_are_restored(folder):
    datasets.enable_progress_bars()

    splits(folder)["train"].exists()

    assert datasets.is_progress_bar_enabled()
