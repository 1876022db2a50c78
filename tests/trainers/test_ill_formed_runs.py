"""Files of a run's folder that the program has not written so: one sentence, and no traceback."""

import json
import shutil
import struct
from dataclasses import replace
from pathlib import Path

import pytest

from llm.checkpoint.format import Checkpoint, write_manifest
from llm.checkpoint.load import list_checkpoints
from llm.errors import CheckpointError, LLMError
from llm.runtime.files import sync_file
from llm.tools.checkpoints import main as checkpoints
from llm.tools.generate import main as generate
from llm.tools.inspect import main as inspect
from llm.trainers.gpt.step_samples import find_step_samples
from tests.support.token_files import random_documents, write_pair
from tests.support.training import FROM_PARENT, Bench

DEEP = "[" * 100_000 + "]" * 100_000


@pytest.fixture(scope="module")
def bench(tmp_path_factory) -> Bench:
    bench = Bench(tmp_path_factory.mktemp("bench"), lines=2)
    write_pair(bench.folder / "tokens", random_documents(60, seed=1))
    bench.train_well(**options(bench))
    return bench


def options(bench: Bench) -> dict[str, object]:
    tokens = {"train_file": None, "data_path": bench.folder / "tokens", "split": "90,10,0"}
    return {**tokens, "max_train_steps": 2, "checkpointing_steps": 2}


@pytest.fixture
def run(bench, tmp_path) -> Path:
    """A copy of the run, which a test may change."""
    return Path(shutil.copytree(bench.folder / "run", tmp_path / "run", symlinks=True))


CONFIGURATIONS = {
    "deep nesting": "x = " + DEEP,
    "a number of 5,000 digits": "seed = " + "9" * 5000,
    "a number of 400 digits": "learning_rate = " + "9" * 400,
    "a number of 10,000 digits in base 16": "seed = 0x" + "f" * 10_000,
    "a value of another type": 'block_size = "large"',
    "a number out of its range": "block_size = -1",
    "an option that does not exist": "no_such_option = 1",
    "a list for a number": "block_size = [1, 2]",
    "another format": "{}",
}


@pytest.mark.parametrize("case", CONFIGURATIONS)
def test_an_ill_formed_configuration_is_refused_by_every_program(run, bench, capsys, case):
    config = run / "config.toml"
    name = CONFIGURATIONS[case].partition(" ")[0]
    lines = [line for line in config.read_text().splitlines() if not line.startswith(f"{name} ")]
    config.write_text("\n".join([*lines, CONFIGURATIONS[case]]))

    for program, words in (
        (generate, ["--checkpoint", "latest"]),
        (checkpoints, ["--export", "latest", str(run / "out")]),
        (inspect, ["--step", "1"]),
    ):
        assert program([str(run), *words]) == 2
        said = capsys.readouterr().err
        assert said.startswith("error: ")
        assert str(config) in said
        assert len(said) < 1000
    with pytest.raises(LLMError, match=r"config\.toml"):
        bench.read("branch", **FROM_PARENT, branch_from=run)


def change_start(run: Path, **changes: object) -> None:
    """Change fields of the logged start (`...` removes one)."""
    lines = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    for line in lines:
        if line.get("event") == "start":
            line |= changes
            for name in [name for name, value in changes.items() if value is ...]:
                del line[name]
    (run / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("step", "one"),
        ("seed", None),
        ("seed", ...),
        ("block_size", "large"),
        ("per_device_train_batch_size", []),
        ("global_batch_size", ...),
        ("total_samples", 8.5),
        ("data_ranks", True),
        ("data", "the same"),
    ],
)
def test_a_start_with_other_fields_is_named_with_its_file(run, capsys, name, value):
    change_start(run, **{name: value})

    assert inspect([str(run), "--step", "1"]) == 2

    shown = None if value is ... else value
    assert capsys.readouterr().err == (
        f"error: {run / 'events.jsonl'} is damaged: a start has the {name} {shown!r}; copy the "
        "file back.\n"
    )


def test_data_with_an_ill_formed_digest_count_as_changed(run, capsys):
    change_start(run, data={"ends": 1, "sidecars": "none"})
    assert inspect([str(run), "--step", "1"]) == 2
    assert "are no longer those that step 1 was trained on" in capsys.readouterr().err


@pytest.mark.parametrize("parent", ["{run}/checkpoints/step_00000002", "/", "nowhere"])
def test_a_run_whose_parent_is_itself_or_gone_is_shown(run, parent, capsys):
    config = (run / "config.toml").read_text().replace("# branch_from is not set\n", "")
    named = f'branch_from = "{parent.format(run=run)}"\n'
    (run / "config.toml").write_text(named + config)

    assert inspect([str(run), "--step", "1"]) == 0

    assert "step              1 of 2" in capsys.readouterr().out


def change_metadata(run: Path, **changes: object) -> Checkpoint:
    """Change the newest checkpoint's metadata (`...` removes a field), with a correct checksum."""
    newest = list_checkpoints(run / "checkpoints")[-1]
    metadata = {**newest.metadata, **changes}
    metadata = {name: value for name, value in metadata.items() if value is not ...}
    write_manifest(replace(newest, metadata=metadata))
    return newest


STARTS = {
    "resume": lambda run: {"output_dir": run, "resume_from_checkpoint": True},
    "branch": lambda run: {**FROM_PARENT, "data_path": None, "split": None, "branch_from": run},
    "weights": lambda run: {"init_from": run},
}


RECORD = ("fixed", "logged", "global_batch_size", "data", "tokenizer", "initial_weights")


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        *(("resume", name) for name in (*RECORD, "skip_samples")),
        ("branch", "tokenizer"),
        ("weights", "tokenizer"),
    ],
)
def test_a_checkpoint_without_a_record_of_its_run_starts_none(run, bench, kind, name):
    changed = change_metadata(run, **{name: ...})

    with pytest.raises(CheckpointError) as caught:
        bench.read("new", **{**options(bench), **STARTS[kind](run)})

    assert str(caught.value) == (
        f"{changed.path} has no record of {name}, so no run can start from it; name another "
        "checkpoint."
    )


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [
        ("fixed", "seed", "one"),
        ("fixed", "max_duration", "many"),
        ("fixed", "learning_rate", []),
        ("fixed", "data_path", "tokens"),
        ("fixed", "betas", [0.9, "high"]),
        ("logged", "per_device_train_batch_size", 1.5),
        ("logged", "torch_compile", "yes"),
    ],
)
def test_a_recorded_option_of_another_type_is_damage(run, bench, kind, name, value):
    newest = list_checkpoints(run / "checkpoints")[-1]
    changed = change_metadata(run, **{kind: {**newest.metadata[kind], name: value}})

    with pytest.raises(CheckpointError) as caught:
        bench.read("new", **{**options(bench), **STARTS["resume"](run)})

    assert str(caught.value) == (
        f"{changed.path} is damaged: it records {value!r} as --{name}; name another checkpoint."
    )


def test_metrics_with_other_fields_do_not_hide_why_a_model_writes_nothing(run):
    from llm.tools.generate import _find_divergence

    lines = [{"loss": 1.0}, {"step": "one", "loss": None}, {"step": 3, "loss": 1.0}]
    text = "".join(json.dumps(line) + "\n" for line in [*lines, {"step": 4, "loss": None}])
    (run / "metrics.jsonl").write_text(f"{DEEP}\n7\n{text}")

    assert _find_divergence(run / "metrics.jsonl") == (3, 4)


def test_the_step_of_an_unchanged_run_is_found(run):
    assert find_step_samples(run, 1, rank=None, data_ranks=None).total_steps == 2


def tensor_file(header: object, body: bytes) -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + body


def ill_formed_tensors(content: bytes) -> dict[str, bytes]:
    """Files of tensors with a fault in their header."""
    size = struct.unpack("<Q", content[:8])[0]
    header, body = json.loads(content[8 : 8 + size]), content[8 + size :]
    name = next(name for name in header if name.startswith("strategy/model/"))
    entry = header[name]
    return {
        "no content": b"",
        "half a length": b"\0" * 4,
        "a length beyond the file": struct.pack("<Q", 2**62) + b"{}",
        "a header that is not JSON": struct.pack("<Q", 4) + b"abcd",
        "a list as the header": tensor_file([], body),
        "metadata of another kind": tensor_file({**header, "__metadata__": [1]}, body),
        "no offsets of shards": tensor_file(
            {**header, "__metadata__": {"DCP_SHARDING_INFO": "x"}}, body
        ),
        "an unknown dtype": tensor_file({**header, name: {**entry, "dtype": "X9"}}, body),
        "a place beyond the file": tensor_file(
            {**header, name: {**entry, "data_offsets": [0, 2**50]}}, body
        ),
        "a place before the file": tensor_file(
            {**header, name: {**entry, "data_offsets": [-8, 0]}}, body
        ),
        "a shape in words": tensor_file({**header, name: {**entry, "shape": "x"}}, body),
        "no shape": tensor_file({**header, name: {"dtype": "F32"}}, body),
    }


def test_sealed_tensors_that_are_ill_formed_are_refused(run, capsys):
    newest = list_checkpoints(run / "checkpoints")[-1]
    shard = next(newest.path.glob("*.safetensors"))
    for fault, content in ill_formed_tensors(shard.read_bytes()).items():
        shard.write_bytes(content)
        write_manifest(replace(newest, files={**newest.files, shard.name: sync_file(shard)}))
        for program, words, refusals in (
            (
                generate,
                ["--checkpoint", "2"],
                ["cannot be read: ", "does not fit this model or optimizer: "],
            ),
            (
                checkpoints,
                ["--last", "1", "--output", str(run / "mean")],
                ["is damaged: its tensors cannot be read ("],
            ),
        ):
            first = ["average"] if program is checkpoints else []
            assert program([*first, str(run), *words]) == 2, fault
            output = capsys.readouterr().err
            assert any(f"error: {newest.path} {refusal}" in output for refusal in refusals), fault
