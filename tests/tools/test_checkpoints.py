import fcntl
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from transformers import AutoModelForCausalLM, AutoTokenizer

from llm.checkpoint.format import Checkpoint
from llm.checkpoint.options import CheckpointOptions
from llm.checkpoint.retention import mark_superseded, remove_checkpoint
from llm.checkpoint.save import Saver
from llm.config.toml import to_toml
from llm.models.configuration import load_config
from llm.tokenizers import load_tokenizer
from llm.tools.checkpoints import main
from llm.tools.generate import main as generate
from llm.trainers.gpt.extensions import GPTConfig
from tests.support.checkpoints import Part, filled, save, saver_of
from tests.support.models import tiny_model
from tests.support.ranks import run_ranks, values
from tests.support.training import Bench, write_model_folder

SHARD = "shard-00001-model-00001-of-00001.safetensors"


@pytest.fixture
def run(tmp_path):
    """A run with the checkpoints of steps 10, 20 and 30, of which step 20 is the best."""
    folder = tmp_path / "run"
    saver = saver_of(folder / "checkpoints", filled(1.0), keep_checkpoints=3, save_top_k=1)
    for step, loss in ((10, 3.0), (20, 2.0), (30, 2.5)):
        saver.save(step=step, eval_loss=loss)
    return folder


def flip_last_bit(path):
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


def rows(output: str) -> dict[str, str]:
    """The lines of the listing by their step."""
    words = [line.split() for line in output.splitlines()]
    return {first: " ".join(rest) for first, *rest in words if first.isdigit()}


def test_the_checkpoints_are_listed_with_the_newest_and_the_best(run, capsys):
    assert main([str(run)]) == 0

    output = capsys.readouterr().out
    listed = rows(output)
    assert list(listed) == ["10", "20", "30"]
    year = time.strftime("%Y-")
    assert listed["10"].startswith("3.0000 8")
    assert f" B {year}" in listed["10"]
    assert listed["10"].endswith(" 1 valid")
    assert listed["20"].endswith(" 1 valid, best")
    assert listed["30"].endswith(" 1 valid, latest")
    assert "latest, where training resumes: step_00000030" in output
    assert "best, with the lowest validation loss: step_00000020" in output
    assert "--verify reads every byte" in output


def test_permanent_checkpoints_are_listed(run, capsys):
    options = {"keep_checkpoints": 1, "save_top_k": 1}
    saver_of(run / "checkpoints", filled(1.0), keep_every=40, **options).save(step=40, eval_loss=4)
    saver_of(run / "checkpoints", filled(1.0), keep_every=50, **options).save(step=50, eval_loss=5)
    saver_of(run / "checkpoints", filled(1.0), keep_every=20, **options).save(step=55, eval_loss=6)

    assert main([str(run)]) == 0

    listed = rows(capsys.readouterr().out)
    assert list(listed) == ["20", "40", "50", "55"]
    assert listed["20"].endswith("valid, best, permanent")
    assert listed["40"].endswith("valid, permanent")
    assert listed["50"].endswith("valid, permanent")
    assert listed["55"].endswith("valid, latest")


def test_a_checkpoint_without_a_validation_loss_is_listed(tmp_path, capsys):
    save(tmp_path / "checkpoints", 1)
    assert main([str(tmp_path)]) == 0
    output = capsys.readouterr().out
    assert rows(output)["1"].startswith("- ")
    assert "best, with the lowest validation loss: no link (--save_top_k keeps one)" in output


@pytest.mark.parametrize("words", [["{}/checkpoints"], ["--run", "{}"], ["--run={}/checkpoints"]])
def test_the_run_may_be_named_by_its_folder_or_that_of_its_checkpoints(run, capsys, words):
    assert main([word.format(run) for word in words]) == 0
    assert list(rows(capsys.readouterr().out)) == ["10", "20", "30"]


def test_an_invalid_checkpoint_is_listed_with_its_fault_and_not_newest(run, capsys):
    folder = run / "checkpoints"
    shutil.copytree(folder / "step_00000030", folder / "step_00000040")
    for step in (50, 60, 70):
        save(folder, step)
    (folder / "step_00000050" / "manifest.json").unlink()
    (folder / "step_00000060" / "state.json").unlink()
    (folder / "step_00000070" / SHARD).write_bytes(b"half")
    shutil.copytree(folder / "step_00000030", folder / ".step_00000080.tmp")

    assert main([str(run)]) == 0

    output = capsys.readouterr().out
    listed = rows(output)
    assert "not valid: its manifest belongs to step 30" in listed["40"]
    assert "not valid: it has no manifest.json" in listed["50"]
    assert listed["60"].endswith("not valid: state.json is missing")
    assert f"not valid: {SHARD} has 4 bytes instead of" in listed["70"]
    assert listed["30"].endswith("valid, latest")
    assert ".step_00000080.tmp, 8" in output
    assert "the next save or start removes it" in output


def test_a_file_with_the_name_of_a_checkpoint_is_listed_as_not_valid(run, capsys):
    folder = run / "checkpoints"
    (folder / "step_00000099").write_text("no folder")

    assert main([str(run)]) == 0

    output = capsys.readouterr().out
    assert "not valid: it has no manifest.json" in rows(output)["99"]
    assert rows(output)["30"].endswith("valid, latest")
    # A training that saves this step takes the name.
    save(folder, 99, keep_checkpoints=5)
    assert main([str(run)]) == 0
    assert rows(capsys.readouterr().out)["99"].endswith("valid, latest")
    assert not list(folder.glob(".step_*"))


def test_verify_detects_damage_of_unchanged_size_and_exits_with_1(run, capsys):
    shard = run / "checkpoints" / "step_00000030" / SHARD
    assert main([str(run), "--verify"]) == 0
    assert "Every byte was read: no damage." in capsys.readouterr().out

    flip_last_bit(shard)

    assert main([str(run)]) == 0
    assert rows(capsys.readouterr().out)["30"].endswith("valid, latest")
    assert main(["--verify", str(run)]) == 1
    output = capsys.readouterr().out
    assert rows(output)["30"].endswith(f"not valid: {SHARD} does not match its checksum")
    assert rows(output)["20"].endswith("valid, latest, best")
    assert "Every byte was read: 1 of 3 damaged." in output


def test_a_superseded_checkpoint_is_listed_with_its_size(run, capsys):
    mark_superseded(run / "checkpoints", step=20)

    assert main([str(run)]) == 0

    output = capsys.readouterr().out
    assert list(rows(output)) == ["10", "20"]
    assert re.search(
        r"step_00000030\.superseded, \d+ B: later than the step that the run resumed from; you can "
        "remove it",
        output,
    )


def test_a_missing_best_checkpoint_is_reported(run, capsys):
    shutil.rmtree(run / "checkpoints" / "step_00000020")
    assert main([str(run)]) == 0
    assert "a link to step_00000020, which does not exist" in capsys.readouterr().out


def test_a_run_without_checkpoints_is_not_an_error(tmp_path, capsys):
    (tmp_path / "config.toml").write_text("seed = 1\n")
    assert main([str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'checkpoints'} holds no checkpoint.\n"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "No run is named: give its folder first"),
        (["{}/missing"], "RUN {}/missing is not a folder"),
        (["{}"], "RUN {} holds no run"),
        (["{}/run", "--export", "30"], "--export expects a step and a folder"),
        (["{}/run", "--verify", "--export", "30", "x"], "leave out --verify"),
        (["{}/run", "--export_dtype", "bf16"], "--export_dtype needs --export"),
        (["--export", "30", "{}/out", "{}/run"], "No run is named: give its folder first"),
        (["{}/run", "--export", "30", "{}/run"], "{}/run is not empty; name a new folder"),
        (
            ["{}/run", "--export", "30", "{}/run/checkpoints/out"],
            "--export 30 {}/run/checkpoints/out is within the files of the run {}/run; name a "
            "folder outside of them.",
        ),
        (["average", "{}/run"], "--output is missing"),
        (["{}/run", "--output", "{}/out"], "the word average is missing"),
        (["{}/run", "--last", "2"], "--last needs --output"),
        (["{}/run", "--ema"], "--ema needs --export"),
        (["average", "{}/run", "--output", "{}/run"], "{}/run is not empty; name a new folder"),
        (
            ["average", "{}/run", "--output", "{}/run/checkpoints/step_00000010/state.json"],
            "--output {}/run/checkpoints/step_00000010/state.json is a file; name a new folder.",
        ),
        (
            ["average", "{}/run", "--output", "{}/out"],
            "{}/run has no config.toml, which says what model was trained; name the --output_dir",
        ),
        (["{}/run", "more"], "'more' has no option before it"),
        (["{}/run", "--verfy"], "There is no option --verfy; did you mean verify?"),
    ],
)
def test_invalid_options_are_refused_in_one_sentence(run, capsys, words, said):
    folder = run.parent
    assert main([word.format(folder) for word in words]) == 2
    error = capsys.readouterr().err
    assert said.replace("{}", str(folder)) in error
    assert error.count("\n") == 1
    assert os.listdir(folder) == ["run"]


def test_a_listing_starts_at_once_since_it_imports_two_small_libraries(run):
    code = (
        "import sys; before = {*sys.modules}\n"
        "from llm.tools.checkpoints import main\n"
        f"assert main([{str(run)!r}, '--verify']) == 0\n"
        "print('imported', *{name.partition('.')[0] for name in {*sys.modules} - before})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    imported = done.stdout.splitlines()[-1].split()[1:]
    assert {*imported} - sys.stdlib_module_names == {"llm", "packaging", "xxhash"}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run that has ended: tied weights, padded vocabulary, a checkpoint of its last step."""
    bench = Bench(tmp_path_factory.mktemp("bench"), lines=60)
    return bench.train_well(
        max_train_steps=4, checkpointing_steps=2, save_top_k=2, pad_vocab_to_multiple_of=64
    ).folder


def test_an_export_equals_the_one_at_the_end_of_training(trained, tmp_path, capsys):
    assert main([str(trained), "--export", "latest", str(tmp_path / "out")]) == 0

    assert "step_00000004 is exported" in capsys.readouterr().out
    exported = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert exported == [
        "README.md",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    for name in exported[1:]:
        assert (tmp_path / "out" / name).read_bytes() == (trained / name).read_bytes()
    assert "| steps | 4 |" in (tmp_path / "out" / "README.md").read_text()


def test_a_checkpoint_is_exported_in_the_precision_asked_for(trained, tmp_path):
    out = tmp_path / "out"
    assert main([str(trained), "--export", "latest", str(out), "--export_dtype", "bf16"]) == 0
    assert AutoModelForCausalLM.from_pretrained(out, dtype="auto").dtype == torch.bfloat16


def test_any_step_can_be_exported(trained, tmp_path):
    assert main([str(trained / "checkpoints"), "--export", "2", str(tmp_path / "2")]) == 0
    assert main([str(trained), "--export", "best", str(tmp_path / "best")]) == 0

    step2 = AutoModelForCausalLM.from_pretrained(tmp_path / "2")
    best = AutoModelForCausalLM.from_pretrained(tmp_path / "best")
    end = AutoModelForCausalLM.from_pretrained(trained)
    assert step2.get_input_embeddings().weight is step2.get_output_embeddings().weight
    # Without the rows that pad it.
    assert step2.get_input_embeddings().weight.shape[0] == step2.config.vocab_size == 320
    assert len(AutoTokenizer.from_pretrained(tmp_path / "2")) <= 320
    differ = [
        not torch.equal(parameter, end.get_parameter(name))
        for name, parameter in step2.named_parameters()
    ]
    assert all(differ)
    # The loss falls in so few steps.
    assert os.readlink(trained / "checkpoints" / "best") == "step_00000004"
    for name, parameter in best.named_parameters():
        assert torch.equal(parameter, end.get_parameter(name))


def test_the_mean_of_checkpoints_is_an_ordinary_export(trained, tmp_path, capsys):
    for step in "24":
        assert main([str(trained), "--export", step, str(tmp_path / step)]) == 0
    words = ["average", str(trained), "--last", "2", "--output", str(tmp_path / "mean")]
    assert main(words) == 0

    assert "The mean of the weights after steps 2, 4 is exported" in capsys.readouterr().out
    mean, *both = (AutoModelForCausalLM.from_pretrained(tmp_path / d) for d in ("mean", "2", "4"))
    assert mean.get_input_embeddings().weight is mean.get_output_embeddings().weight
    for name, tensor in mean.state_dict().items():
        second, fourth = (model.state_dict()[name].double() for model in both)
        assert torch.equal(tensor, ((second + fourth) / 2).float())
    assert {p.name for p in (tmp_path / "mean").iterdir()} == {
        *(path.name for path in (tmp_path / "4").iterdir()),
        "mean.json",
    }
    record = json.loads((tmp_path / "mean" / "mean.json").read_text())
    assert record == {"run": str(trained.resolve()), "steps": [2, 4]}
    assert "| mean of steps | 2, 4 |" in (tmp_path / "mean" / "README.md").read_text()

    assert main([*words[:3], "3", "--output", str(tmp_path / "more")]) == 2
    assert "holds 2 valid checkpoints; choose a smaller number." in capsys.readouterr().err
    assert main([str(trained), "--export", "4", str(tmp_path / "ema"), "--ema"]) == 2
    assert "step_00000004 has no moving average" in capsys.readouterr().err


def test_the_newest_checkpoint_alone_is_named_in_the_singular(trained, tmp_path, capsys):
    folder = tmp_path / "run"
    shutil.copytree(trained, folder, symlinks=True)
    shutil.rmtree(folder / "checkpoints/step_00000002")
    words = ["average", str(folder), "--last", "2", "--output", str(tmp_path / "mean")]

    assert main(words) == 2
    assert capsys.readouterr().err.endswith("holds 1 valid checkpoint; choose a smaller number.\n")
    shutil.rmtree(folder / "checkpoints")
    assert main(words) == 2
    assert capsys.readouterr().err.endswith("checkpoints holds no valid checkpoint.\n")


def peaks_of_averages(pairs: list[tuple[Path, Path]]) -> list[int]:
    """Bytes in memory at most, after the mean of the checkpoints of each run."""
    peaks = []
    for run, output in pairs:
        assert main(["average", str(run), "--last", "2", "--output", str(output)]) == 0
        status = Path("/proc/self/status").read_text()
        peaks.append(1024 * int(re.search(r"VmHWM:\s*(\d+)", status)[1]))
    return peaks


@pytest.mark.extended
def test_averaging_takes_little_more_memory_than_one_model(trained, tmp_path):
    """A model of 160 MB in two checkpoints, after a small one that has loaded all libraries."""
    run = tmp_path / "run"
    folder = write_model_folder(tmp_path / "model", n_embd=640, n_layer=8, n_head=8)
    config = GPTConfig(model_name_or_path=str(folder), seed=1)
    model = tiny_model(load_config(config))
    weights = {name: p.detach() for name, p in model.named_parameters()}
    metadata = {"initial_weights": "random, seed 1"}
    copies = {f"tokenizer/{path.name}": path.read_bytes() for path in folder.iterdir()}
    saver = Saver(
        CheckpointOptions(async_checkpoint=False), run / "checkpoints", metadata=metadata,
        parts={"strategy": Part({"model": weights})}, rank=0, world_size=1,
        extra_files={**copies, "model/config.json": copies["tokenizer/config.json"]},
    )  # fmt: skip
    for step in (1, 2):
        saver.save(step=step, eval_loss=None)
    (run / "config.toml").write_text(to_toml(config))
    pairs = [(trained, tmp_path / "small"), (run, tmp_path / "large")]
    ((before, after),) = values(run_ranks(peaks_of_averages, 1, pairs))
    size = (tmp_path / "large" / "model.safetensors").stat().st_size
    assert size > 1.5e8
    assert 0.9 * size < after - before < 1.2 * size


@pytest.fixture
def damaged(trained, tmp_path):
    """A copy of the run in which the last checkpoint has a flipped bit."""
    folder = tmp_path / "damaged"
    shutil.copytree(trained, folder, symlinks=True)
    flip_last_bit(folder / "checkpoints" / "step_00000004" / SHARD)
    return folder


@pytest.mark.parametrize(
    ("step", "said"),
    [
        ("4", f"step_00000004 is damaged: {SHARD} does not match its checksum."),
        ("best", f"step_00000004 is damaged: {SHARD} does not match its checksum."),
        ("3", "--export 3 names no checkpoint of"),
        ("newest", "there are 2, 4, latest, best."),
    ],
)
def test_a_damaged_or_missing_checkpoint_is_refused_before_any_write(
    damaged, tmp_path, capsys, step, said
):
    assert main([str(damaged), "--export", step, str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_latest_exports_the_newest_valid_checkpoint_and_names_damaged_ones(
    damaged, tmp_path, capsys
):
    assert main([str(damaged), "--export", "latest", str(tmp_path / "out")]) == 0
    said = capsys.readouterr()
    assert "Skipping a checkpoint: " in said.err
    assert "step_00000002 is exported" in said.out


def test_a_checkpoint_that_does_not_match_the_configuration_is_refused(damaged, tmp_path, capsys):
    config = damaged / "config.toml"
    text = config.read_text()
    assert "pad_vocab_to_multiple_of = 64" in text
    config.write_text(
        text.replace("pad_vocab_to_multiple_of = 64", "pad_vocab_to_multiple_of = 100")
    )
    assert main([str(damaged), "--export", "2", str(tmp_path / "out")]) == 2
    assert "does not fit this model or optimizer: Size mismatch" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_full_disk_ends_an_export_with_a_sentence(trained, tmp_path, capsys, monkeypatch):
    def refuse(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", refuse)
    assert main([str(trained), "--export", "2", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {tmp_path / 'out'} cannot be written: ")
    assert "No space left on device" in error
    assert os.listdir(tmp_path / "out") == []


EXPORT, AVERAGE = ["{}", "--export", "2", "{}"], ["average", "{}", "--last", "2", "--output", "{}"]


def write_export(words: list[str], run: Path, target: Path) -> int:
    places = iter((run, target))
    return main([str(next(places)) if word == "{}" else word for word in words])


def killed_export(words: list[str], run: Path, target: Path, call: int) -> None:
    """Writes an export, and is killed before a file gets its final name."""
    count, replace = itertools.count(), os.replace

    def replace_or_die(source: Path, target: Path) -> None:
        if next(count) == call:
            os.kill(os.getpid(), signal.SIGKILL)
        replace(source, target)

    os.replace = replace_or_die
    write_export(words, run, target)


def exported_files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "README.md"}


@pytest.mark.parametrize(
    "words",
    [EXPORT, pytest.param(AVERAGE, marks=pytest.mark.extended)],
    ids=["export", "average"],
)
def test_a_killed_export_is_repeated_by_the_same_command(trained, tmp_path, words):
    assert write_export(words, trained, tmp_path / "whole") == 0
    whole = exported_files(tmp_path / "whole")

    for call in (0, 3, len(whole)):
        target = tmp_path / str(call)
        [outcome] = run_ranks(killed_export, 1, words, trained, target, call)
        assert outcome.error == "ended with code -9"
        assert ".unfinished" in os.listdir(target)

        assert write_export(words, trained, target) == 0
        assert exported_files(target) == whole


def test_files_of_others_in_the_folder_of_a_killed_export_are_kept(trained, tmp_path, capsys):
    for name in (".unfinished", "config.json", "notes.txt"):
        (tmp_path / name).write_text("mine")

    assert write_export(EXPORT, trained, tmp_path) == 2
    assert "is not empty; name a new folder" in capsys.readouterr().err
    assert len(os.listdir(tmp_path)) == 3


def test_two_exports_cannot_write_to_one_folder(trained, tmp_path, capsys):
    with (tmp_path / ".unfinished").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert write_export(EXPORT, trained, tmp_path) == 2
    assert "is being written by another process; wait for it" in capsys.readouterr().err


MOMENTS = {
    "as it is verified": (Checkpoint, "find_problem"),
    "before the tokenizer is read": (load_tokenizer, "load_tokenizer"),
    "before the weights are read": (HuggingFaceStorageReader, "read_metadata"),
}


AGAIN = "Training removed checkpoints of {}/checkpoints; reading again.\n"


@pytest.fixture
def training(request, trained, tmp_path, monkeypatch):
    """A run that saves step 4 and removes step 2 while a program reads step 2."""
    folder = tmp_path / "training"
    shutil.copytree(trained, folder, symlinks=True)
    (folder / "model.safetensors").unlink()
    saved = folder / "checkpoints"
    (saved / "best").unlink()
    (saved / "step_00000004").rename(saved / ".step_00000004.tmp")
    owner, name = MOMENTS[getattr(request, "param", "before the weights are read")]
    original = getattr(owner, name)

    def interrupted(*args, **options):
        is_listing = name == "find_problem" and not options
        if (saved / ".step_00000004.tmp").exists() and not is_listing:
            (saved / ".step_00000004.tmp").rename(saved / "step_00000004")
            remove_checkpoint(saved / "step_00000002")
        return original(*args, **options)

    monkeypatch.setattr(owner, name, interrupted)
    return folder


@pytest.mark.parametrize("training", MOMENTS, indirect=True)
def test_the_newest_checkpoint_is_read_if_one_is_removed_meanwhile(training, tmp_path, capsys):
    assert main([str(training), "--export", "latest", str(tmp_path / "out")]) == 0

    said = capsys.readouterr()
    assert "step_00000004 is exported" in said.out
    assert said.err == AGAIN.format(training)


def test_text_is_generated_by_the_newest_if_one_is_removed_meanwhile(training, capsys):
    assert generate([str(training), "--seed", "1", "--max_new_tokens", "5"]) == 0
    assert AGAIN.format(training) in capsys.readouterr().err


def test_the_mean_is_that_of_the_newest_if_one_is_removed_meanwhile(training, tmp_path, capsys):
    words = ["average", str(training), "--last", "1", "--output", str(tmp_path / "out")]
    assert main(words) == 0
    said = capsys.readouterr()
    assert "after step 4 is exported" in said.out
    assert AGAIN.format(training) in said.err


def test_a_step_that_is_removed_while_it_is_read_is_named(training, tmp_path, capsys):
    assert main([str(training), "--export", "2", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert AGAIN.format(training) in error
    assert "--export 2 names no checkpoint of" in error
    assert "there are 4, latest" in error
