"""Checkpoints with correct checksums that no version of this program has written."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from llm.checkpoint.format import MANIFEST, STATE_FILE, add_checksum, read_manifest, write_manifest
from llm.checkpoint.load import (
    find_newest_checkpoint,
    list_checkpoints,
    load_state,
    read_part_names,
    read_verified_checkpoint,
)
from llm.errors import CheckpointError
from llm.runtime.files import sync_file
from tests.support.checkpoints import Part, filled, save, saver_of

DEEP = "[" * 100_000 + "]" * 100_000
COPIES = {
    "model/config.json": b"{}",
    "tokenizer/tokenizer.json": b"{}",
    "tokenizer/sub/vocab.txt": b"a",
}


def seal(checkpoint: Path, **changes: object) -> None:
    """Change fields of a manifest (`...` removes one), with a correct checksum."""
    manifest = {**json.loads((checkpoint / MANIFEST).read_text()), **changes}
    manifest.pop("checksum")
    fields = {name: value for name, value in manifest.items() if value is not ...}
    (checkpoint / MANIFEST).write_text(add_checksum(json.dumps(fields, indent=1)))


def seal_files(checkpoint: Path, **changes: object) -> None:
    seal(checkpoint, files={**json.loads((checkpoint / MANIFEST).read_text())["files"], **changes})


def seal_state(checkpoint: Path, text: str) -> None:
    """Replace the state without tensors, with correct checksums."""
    (checkpoint / STATE_FILE).write_text(text)
    sealed = read_manifest(checkpoint)
    write_manifest(
        replace(sealed, files={**sealed.files, STATE_FILE: sync_file(checkpoint / STATE_FILE)})
    )


MANIFESTS = {
    "no step": {"step": ...},
    "a step in words": {"step": "two"},
    "true as the step": {"step": True},
    "a negative step": {"step": -2},
    "no time": {"saved_at": ...},
    "a number as the time": {"saved_at": 12},
    "a time that moves the cursor": {"saved_at": "\x1b[2J"},
    "no number of ranks": {"world_size": ...},
    "ranks in words": {"world_size": "one"},
    "no facts": {"facts": ...},
    "a list of facts": {"facts": []},
    "a loss in words": {"facts": {"eval_loss": "low"}},
    "a list of fixed options": {"facts": {"fixed": []}},
    "a branch in words": {"facts": {"branch": "main"}},
    "a branch without a step": {"facts": {"branch": {"parent": "a", "cooldown_from": None}}},
    "no files": {"files": ...},
    "a list of files": {"files": []},
    "a file that is null": {"files": None},
    "an empty table of files": {"files": {}},
}
FILES = {
    "a file with a number": 7,
    "a file without a checksum": [7],
    "a file with a size in words": ["seven", "0"],
    "a file with a checksum of numbers": [7, 0],
    "a file with three entries": [7, "0", "0"],
}
NAMES = ("../x", "model/../../x", "/etc/hostname", "", ".", "./state.json", "model//x", "a\x1b[2J")


@pytest.mark.parametrize("case", [*MANIFESTS, *FILES, *NAMES])
def test_a_sealed_manifest_that_is_ill_formed_is_damaged(tmp_path, caplog, case):
    caplog.set_level("INFO", logger="llm")
    save(tmp_path, 1)
    bad = save(tmp_path, 2)
    if case in MANIFESTS:
        seal(bad, **MANIFESTS[case])
    elif case in FILES:
        seal_files(bad, **{"model/config.json": FILES[case]})
    else:
        seal_files(bad, **{case: [0, "0"]})

    with pytest.raises(CheckpointError, match=r"step_00000002/manifest\.json is damaged: "):
        read_manifest(bad)
    assert find_newest_checkpoint(tmp_path).step == 1
    assert f"Skipping a checkpoint: {bad / MANIFEST} is damaged: " in caplog.text
    assert [checkpoint.step for checkpoint in list_checkpoints(tmp_path)] == [1]


@pytest.mark.parametrize(
    "content",
    ["[]", "null", "7", '{"format": 2}', DEEP, "9" * 5000],
    ids=["list", "null", "number", "format alone", "deep list", "number of 5,000 digits"],
)
def test_a_manifest_that_is_not_an_object_is_damaged(tmp_path, content):
    save(tmp_path, 1)
    bad = save(tmp_path, 2)
    (bad / MANIFEST).write_text(content)

    with pytest.raises(
        CheckpointError, match=r"step_00000002/manifest\.json is damaged: "
    ) as caught:
        read_manifest(bad)
    assert "indices" not in str(caught.value)  # as Python would say of a list
    assert find_newest_checkpoint(tmp_path).step == 1


def test_a_run_saves_and_prunes_next_to_an_ill_formed_manifest(tmp_path):
    save(tmp_path, 1)
    seal(save(tmp_path, 2), facts={"eval_loss": "low"})

    saver_of(tmp_path, filled(3.0), keep_checkpoints=1, save_top_k=1).save(step=3, eval_loss=1.0)

    assert find_newest_checkpoint(tmp_path).step == 3


@pytest.mark.parametrize(
    "state",
    ["not JSON", "[]", '"part"', '{"part": []}', DEEP],
    ids=["not JSON", "list", "text", "part that is a list", "deep list"],
)
def test_a_sealed_state_that_is_no_table_of_parts_is_damaged(tmp_path, state):
    save(tmp_path, 1)
    bad = save(tmp_path, 2)
    seal_state(bad, state)

    assert find_newest_checkpoint(tmp_path).step == 1
    with pytest.raises(CheckpointError, match=r"step_00000002 is damaged: state\.json is not "):
        read_verified_checkpoint(bad)
    with pytest.raises(CheckpointError, match=r"state\.json is not "):
        read_part_names(read_manifest(bad))


class Counter(Part):
    """A part that reads one number."""

    def load_state_dict(self, state):
        self.state = {"count": 1 + state["count"]}


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        ({}, "KeyError: the key 'count' is missing"),
        ({"count": "two"}, "TypeError: unsupported operand type"),
        ({"count": None}, "TypeError: unsupported operand type"),
    ],
)
def test_a_state_that_a_part_cannot_read_is_refused_by_its_name(tmp_path, state, reason):
    saver_of(tmp_path, Counter({"count": 3})).save(step=1, eval_loss=None)
    bad = tmp_path / "step_00000001"
    seal_state(bad, json.dumps({"part": state}))

    with pytest.raises(CheckpointError) as caught:
        load_state(read_verified_checkpoint(bad), {"part": Counter({"count": 0})})

    assert str(caught.value).startswith(
        f"{bad / STATE_FILE} does not hold the state of part that this version reads: {reason}"
    )


def saved_with_copies(folder: Path) -> Path:
    """A checkpoint with copies of a model's configuration and a tokenizer, after an older one."""
    save(folder, 1)
    saver_of(folder, filled(2.0), copies=COPIES).save(step=2, eval_loss=None)
    return folder / "step_00000002"


def link(path: Path) -> None:
    path.symlink_to("/etc/hostname")


UNLISTED = {
    "a file of the model": ("model/extra.json", lambda path: path.write_text("{}")),
    "Python code": ("model/modeling_x.py", lambda path: path.write_text("1")),
    "a hidden file": ("model/.hidden", lambda path: path.write_text("")),
    "a file of the tokenizer": ("tokenizer/added_tokens.json", lambda path: path.write_text("{}")),
    "a file in a folder": ("tokenizer/sub/a.json", lambda path: path.write_text("{}")),
    "a link to a file": ("model/generation_config.json", link),
    "a broken link": ("model/chat_template.jinja", lambda path: path.symlink_to("nowhere")),
    "a link to a folder": ("tokenizer/chat", lambda path: path.symlink_to("/etc")),
    "tensors": ("shard-00009.safetensors", lambda path: path.write_bytes(b"")),
    "a hidden file of tensors": (".x.safetensors", lambda path: path.write_bytes(b"")),
}


@pytest.mark.parametrize("case", UNLISTED)
def test_a_file_that_the_manifest_does_not_list_is_refused(tmp_path, case):
    bad = saved_with_copies(tmp_path)
    assert read_verified_checkpoint(bad).step == 2
    name, write = UNLISTED[case]
    write(bad / name)

    with pytest.raises(CheckpointError) as caught:
        read_verified_checkpoint(bad)

    assert str(caught.value) == f"{bad} is damaged: {name} does not belong to it."
    assert find_newest_checkpoint(tmp_path).step == 1
    assert [checkpoint.step for checkpoint in list_checkpoints(tmp_path)] == [1]


@pytest.mark.parametrize("name", ["state.json", "model/config.json", "model", "tokenizer"])
def test_a_link_in_place_of_a_listed_file_is_refused(tmp_path, name):
    bad = saved_with_copies(tmp_path / "checkpoints")
    (bad / name).rename(tmp_path / "moved")
    (bad / name).symlink_to(tmp_path / "moved")

    with pytest.raises(CheckpointError, match=r"is a link instead of a file"):
        read_verified_checkpoint(bad)


def test_other_files_and_links_to_a_checkpoint_are_accepted(tmp_path):
    good = saved_with_copies(tmp_path / "checkpoints")
    (good / "note.txt").write_text("the best so far")  # nothing reads it
    (good / "model" / "empty").mkdir()
    (tmp_path / "link").symlink_to(good)
    shutil.copytree(good, tmp_path / "copy")

    for path in (good, tmp_path / "link", tmp_path / "copy"):
        assert read_verified_checkpoint(path).step == 2
