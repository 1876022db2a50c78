import os
import sys

import datasets
import pytest

from llm.data.hub_files import find_hub_files, find_repository
from llm.errors import DataError
from llm.prepare.text.blocks import BadRecordPolicy
from llm.prepare.text.hub import make_dataset_source
from llm.prepare.text.sources import check_sources_unchanged
from tests.support.texts import texts_of, write


def splits(name, config=None, **changes):
    settings = {"text_column": None, "trust_remote_code": False}
    return {
        split: make_dataset_source(str(name), config, split, **{**settings, **changes})
        for split in ("train", "validation")
    }


@pytest.fixture(autouse=True)
def library_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("hf"))


@pytest.fixture
def on_hub(tmp_path, monkeypatch):
    """A data set on the Hub; its files are in a folder here."""
    load = datasets.load_dataset
    folder = tmp_path / "repository"
    folder.mkdir()
    monkeypatch.setattr(
        datasets, "load_dataset", lambda _, config, **options: load(str(folder), config, **options)
    )
    return folder


@pytest.fixture
def stories(on_hub):
    """Its name."""
    write(on_hub / "train.jsonl", '{"text": "one"}\n{"text": null}\n{"text": "two"}\n')
    write(on_hub / "validation.jsonl", '{"text": "three"}\n')
    return "me/stories"


@pytest.fixture
def shards(on_hub):
    """The name of a data set with a training split of three files with ten records each."""
    for shard in range(3):
        lines = "".join(f'{{"id": {row}, "text": "{shard}.{row}"}}\n' for row in range(10))
        write(on_hub / f"train-{shard}.jsonl", lines)
    return "me/shards"


@pytest.fixture
def saved(tmp_path):
    """A folder that the library has written."""
    texts = {"train": ["one", None, "two"], "validation": ["three"]}
    splits = {split: datasets.Dataset.from_dict({"text": texts[split]}) for split in texts}
    datasets.DatasetDict(splits).save_to_disk(tmp_path / "saved")
    return tmp_path / "saved"


SHARD_TEXTS = [f"{shard}.{row}" for shard in range(3) for row in range(10)]


@pytest.mark.parametrize("streaming", [False, True])
def test_the_splits_of_a_data_set_have_records_that_are_documents(stories, streaming):
    found = splits(stories, streaming=streaming)

    assert found["validation"].exists()
    assert texts_of(found["train"]) == ["one", "", "two"]
    assert texts_of(found["validation"]) == ["three"]
    assert not found["train"].one_document


@pytest.mark.parametrize("name", ["text", "json"])
def test_the_name_of_a_builder_without_such_a_folder_is_refused(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "b.txt", "private")

    with pytest.raises(DataError, match=f"--dataset_name {name} is a file format of the `data"):
        splits(name)["train"].exists()


def test_a_saved_data_set_is_read_without_configuration_and_says_so(saved, caplog):
    found = splits(saved, "wikitext-2-raw-v1")

    assert texts_of(found["validation"]) == ["three"]
    assert (
        "--dataset_config_name wikitext-2-raw-v1 has no effect: save_to_disk wrote" in caplog.text
    )
    (part,) = splits(saved, streaming=True)["train"].split(1)
    assert texts_of(part) == ["one", "", "two"]  # from the disk all the same


def test_a_saved_configuration_is_a_folder_in_the_named_one(saved, tmp_path, caplog):
    (tmp_path / "set").mkdir()
    saved.rename(tmp_path / "set" / "small")

    assert texts_of(splits(tmp_path / "set", "small")["validation"]) == ["three"]
    assert not caplog.messages


def test_a_saved_single_split_is_the_training_text(tmp_path):
    datasets.Dataset.from_dict({"text": ["one"]}).save_to_disk(tmp_path / "saved")

    found = splits(tmp_path / "saved")

    assert texts_of(found["train"]) == ["one"]
    assert not found["validation"].exists()


def test_a_data_set_without_a_train_split_is_refused_with_its_splits(on_hub):
    write(on_hub / "test.jsonl", '{"text": "x"}\n')

    for streaming in (False, True):
        with pytest.raises(DataError, match="no split 'train', only: test"):
            texts_of(splits("me/data", streaming=streaming)["train"])


@pytest.mark.parametrize("streaming", [False, True])
def test_a_missing_column_of_a_data_set_is_refused_with_a_list(stories, streaming):
    with pytest.raises(DataError, match="no column 'body'; choose one with --text_column from"):
        texts_of(splits(stories, text_column="body", streaming=streaming)["train"])


@pytest.mark.parametrize("streaming", [False, True])
def test_a_data_set_without_a_text_column_gives_its_only_string_column(on_hub, streaming):
    write(on_hub / "train.jsonl", '{"id": 1, "body": "one"}\n')
    write(on_hub / "validation.jsonl", '{"id": 2, "body": "two"}\n')
    assert texts_of(splits("me/data", streaming=streaming)["train"]) == ["one"]

    for name in ("train", "validation"):
        write(on_hub / f"{name}.jsonl", '{"id": 1, "body": "one", "title": "two"}\n')
    with pytest.raises(DataError, match="--text_column from: body, title"):
        texts_of(splits("me/data", streaming=streaming)["train"])

    for name in ("train", "validation"):
        write(on_hub / f"{name}.jsonl", '{"id": 1, "body": "one", "title": null}\n')
    with pytest.raises(DataError, match="'title' is null there and may be the right one; choose"):
        texts_of(splits("me/data", streaming=streaming)["train"])


def test_a_name_that_the_hub_does_not_know_is_refused_with_a_remedy(hub):
    with pytest.raises(
        DataError,
        match=r"--dataset_name me/none cannot .*\(.*'me/none' .*\); "
        "check the name and the connection, or name a local folder",
    ):
        splits("me/none", "wikitext-2-raw-v1")["train"].exists()


def test_an_old_name_without_an_owner_is_looked_up_on_the_hub(hub, caplog, monkeypatch):
    hub.owners = {"wikitext": "Salesforce"}
    write(hub.folder("Salesforce/wikitext", "datasets") / "train.jsonl", '{"text": "one"}\n')
    caplog.set_level("INFO", "llm")

    assert texts_of(splits("wikitext")["train"]) == ["one"]

    assert "the Hugging Face Hub calls wikitext Salesforce/wikitext" in caplog.messages
    assert find_hub_files("wikitext", None).name == "Salesforce/wikitext"
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert find_repository("wikitext") == "Salesforce/wikitext"  # its name in the cache


def test_a_data_set_that_is_a_script_is_refused_with_a_remedy(hub):
    (hub.folder("EleutherAI/pile", "datasets") / "pile.py").write_text("")

    with pytest.raises(DataError, match=r"--dataset_name EleutherAI/pile is a Python script, .*of"):
        splits("EleutherAI/pile", "all")["train"].exists()


def test_a_stream_that_breaks_off_is_reported_in_one_sentence(monkeypatch):
    def rows():
        yield {"text": "one"}
        raise ConnectionError("the network is gone")

    stream = datasets.IterableDataset.from_generator(rows)
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: {"train": stream})

    with pytest.raises(DataError, match=r"--dataset_name far/away cannot be loaded .*network is"):
        texts_of(splits("far/away", streaming=True)["train"])


def test_the_identity_of_a_data_set_needs_no_library(saved, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)  # importing it now fails

    before = splits(saved)["train"].identity()

    assert splits(saved)["validation"].identity() != before
    assert (
        splits("wikitext", "a")["train"].identity() != splits("wikitext", "b")["train"].identity()
    )
    write(saved / "train" / "more.arrow", "another size")
    assert splits(saved)["train"].identity() != before


def test_the_identity_of_a_data_set_includes_the_times_of_its_files(saved):
    found = splits(saved)["train"]
    before = found.identity()
    check_sources_unchanged([found])

    os.utime(saved / "dataset_dict.json", ns=(0, 0))

    assert splits(saved)["train"].identity() != before
    assert found.identity() == before
    with pytest.raises(
        DataError, match=r"dataset_dict\.json has changed while the text was prepared"
    ):
        check_sources_unchanged([found])


def test_a_broken_link_in_a_saved_data_set_is_refused(saved):
    (saved / "more.arrow").symlink_to("nothing")

    with pytest.raises(DataError, match=r"--dataset_name .*/more\.arrow is a broken link; re"):
        splits(saved)


def test_a_broken_file_of_a_saved_data_set_is_one_sentence(saved):
    write(saved / "train" / "state.json", "{")

    with pytest.raises(DataError, match=r"--dataset_name .*saved cannot be read: "):
        splits(saved)["train"].exists()


@pytest.mark.parametrize("rows", [7, 10, 100])
def test_the_chunks_of_a_data_set_are_its_rows_in_order(shards, monkeypatch, rows):
    monkeypatch.setattr("llm.prepare.text.hub._ROWS_PER_CHUNK", rows)

    parts = splits(shards)["train"].split(1)

    assert len(parts) == -(-30 // rows)
    assert [text for part in parts for text in texts_of(part)] == SHARD_TEXTS


def test_the_chunks_of_a_stream_are_its_files_in_order(shards):
    parts = splits(shards, streaming=True)["train"].split(1)

    assert [texts_of(part) for part in parts] == [SHARD_TEXTS[i : i + 10] for i in (0, 10, 20)]


def test_a_wrong_row_is_counted_from_the_beginning_of_the_data_set(shards, monkeypatch):
    monkeypatch.setattr("llm.prepare.text.hub._ROWS_PER_CHUNK", 20)
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


def test_the_progress_bars_of_the_library_are_restored(saved):
    datasets.enable_progress_bars()

    splits(saved)["train"].exists()

    assert datasets.is_progress_bar_enabled()
