"""A run keeps the model's configuration and the tokenizer, whatever becomes of the originals."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from llm.checkpoint.format import Checkpoint, write_manifest
from llm.checkpoint.load import find_newest_checkpoint, list_checkpoints
from llm.errors import LLMError
from llm.models.configuration import load_config
from llm.runtime.files import sync_file
from llm.tokenizers.load_tokenizer import compute_fingerprint
from llm.tools.checkpoints import main as checkpoints
from llm.tools.generate import main as generate
from llm.tools.inspect import main as inspect
from llm.tools.report.report import main as report
from llm.trainers.gpt import seams
from llm.trainers.gpt.extensions import GPTConfig
from llm.trainers.gpt.model_copies import read_model_config
from tests.support.models import tiny_config
from tests.support.token_files import random_documents, write_pair
from tests.support.tokenizers import tiny_tokenizer, tokenizer_with_two_templates
from tests.support.training import Bench, Run

NAMES = {"model_name_or_path": None, "train_file": None}


@pytest.fixture(scope="module")
def bench(tmp_path_factory) -> Bench:
    """Token files without a sidecar, so that nothing else tells one tokenizer from another."""
    bench = Bench(tmp_path_factory.mktemp("bench"), lines=2)
    write_pair(bench.folder / "tokens", random_documents(60, seed=1))
    return bench


def options(bench: Bench, originals: Path) -> dict[str, object]:
    """A run whose model and tokenizer are named by two folders."""
    return {
        **NAMES,
        "config_name": originals / "model",
        "tokenizer_name": originals / "tokenizer",
        "config_overrides": "n_layer=1,attn_pdrop=0",
        "pad_vocab_to_multiple_of": 64,
        "data_path": bench.folder / "tokens",
        "split": "90,10,0",
        "max_train_steps": 4,
        "checkpointing_steps": 2,
    }


@pytest.fixture(scope="module")
def trained(bench) -> Run:
    originals = bench.folder / "originals"
    tiny_config("gpt2").save_pretrained(originals / "model")
    tokenizer_with_two_templates().save_pretrained(originals / "tokenizer")
    return bench.train_well("trained", **options(bench, originals))


@pytest.fixture
def originals(bench, trained, tmp_path):
    """The folders that the run's options name, which a test may change."""
    folder = bench.folder / "originals"
    shutil.copytree(folder, tmp_path / "originals")
    yield folder
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(tmp_path / "originals", folder)


def edit(file: Path, **changes: object) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def other_tokenizer(folder: Path) -> None:
    """Another order of the same tokens."""
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    file.write_text(json.dumps(content))


def start(bench: Bench, name: str, **changes: object) -> seams.Run:
    """What a start reads before it trains."""
    settings = {**options(bench, bench.folder / "originals"), **changes}
    return bench.read(name, **settings)


CONTINUATIONS = {
    "resume": ("trained", {"resume_from_checkpoint": True}),
    "branch": ("branch", {"branch_from": "{}/2"}),
    "evaluation": ("trained", {"resume_from_checkpoint": True, "eval_only": True}),
}


def continuation(kind: str, run: Path) -> tuple[str, dict[str, object]]:
    name, words = CONTINUATIONS[kind]
    return name, {k: v.format(run) if isinstance(v, str) else v for k, v in words.items()}


@pytest.mark.parametrize("kind", CONTINUATIONS)
def test_an_edited_configuration_is_refused(bench, trained, originals, kind):
    name, words = continuation(kind, trained.folder)
    assert start(bench, name, **words).model_config.n_head == 2
    edit(originals / "model" / "config.json", n_head=4, resid_pdrop=0.5)

    with pytest.raises(LLMError) as caught:
        start(bench, name, **words)

    step = "step_00000002" if kind == "branch" else "step_00000004"
    assert str(caught.value) == (
        f"The model's configuration has changed since {trained.folder}/checkpoints/{step} was "
        "written: n_head was 2 and is 4; resid_pdrop was 0.1 and is 0.5. Restore it, or allow the "
        "change with --change_on_resume config_name."
    )
    allowed = start(bench, name, change_on_resume="config_name", **words)
    assert allowed.model_config.n_head == 4


@pytest.mark.parametrize("kind", CONTINUATIONS)
def test_an_edited_tokenizer_is_refused(bench, trained, originals, caplog, kind):
    caplog.set_level("INFO", logger="llm")
    name, words = continuation(kind, trained.folder)
    start(bench, name, change_on_resume="tokenizer_name", **words)
    assert "/tokenizer gives the same ids as the copy in" in caplog.text
    other_tokenizer(originals / "tokenizer")

    with pytest.raises(LLMError) as caught:
        start(bench, name, **words)

    assert f"The tokenizer {originals / 'tokenizer'} gives other ids" in str(caught.value)
    assert "--change_on_resume tokenizer_name." in str(caught.value)
    start(bench, name, change_on_resume="tokenizer_name", **words)
    assert "/tokenizer changes: it gives other ids than the copy in" in caplog.text


@pytest.mark.parametrize(
    ("seed", "said"), [(1, "are the same as those"), (2, "change: they are not those")]
)
@pytest.mark.parametrize("kind", ["resume", "branch"])
def test_training_data_in_another_place_are_compared(
    bench, trained, tmp_path, caplog, kind, seed, said
):
    caplog.set_level("INFO", logger="llm")
    write_pair(tmp_path / "tokens", random_documents(60, seed=seed))
    name, words = continuation(kind, trained.folder)

    start(bench, name, data_path=tmp_path / "tokens", change_on_resume="data_path", **words)

    assert f"The training data {said} with which {trained.folder}/checkpoints/" in caplog.text


def test_a_model_that_is_not_a_local_path_is_the_copy(bench, trained, originals, caplog):
    caplog.set_level("INFO", logger="llm")
    shutil.rmtree(originals)
    run = start(bench, "trained", resume_from_checkpoint=True)

    assert run.model_config.n_layer == 1
    copy = trained.folder / "checkpoints" / "step_00000004"
    name = originals / "model"
    said = f"{name} is not a local path: the model's configuration is the copy in {copy}."
    assert said in caplog.text


@pytest.mark.parametrize(
    "fields",
    [
        {"dtype": "bfloat16", "transformers_version": "5.0.0"},
        {"use_cache": False},
        {"_comment": "ours"},
        {"id2label": {"0": "no", "1": "yes", "2": "maybe"}},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_what_does_not_change_the_model_may_be_edited(bench, trained, originals, fields):
    edit(originals / "model" / "config.json", **fields)
    run = start(bench, "trained", resume_from_checkpoint=True)
    assert run.resume_from == find_newest_checkpoint(trained.folder / "checkpoints")


def edit_copies(run: Path, **changes: object) -> None:
    """Change the configuration in the checkpoints of a run, and their manifests with it."""
    for checkpoint in list_checkpoints(run / "checkpoints"):
        edit(checkpoint.path / "model" / "config.json", **changes)
        entry = sync_file(checkpoint.path / "model" / "config.json")
        write_manifest(replace(checkpoint, files={**checkpoint.files, "model/config.json": entry}))


def test_a_copy_of_another_version_of_the_library_has_other_fields(bench, trained, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(trained.folder, run, symlinks=True)
    edit_copies(run, tie_encoder_decoder=False, torchscript=False, _comment="theirs")
    words = {"output_dir": run, "resume_from_checkpoint": True}
    start(bench, "run", **words)

    edit_copies(run, n_head=4)
    with pytest.raises(LLMError, match=r"was written: n_head was 4 and is 2\. Restore it"):
        start(bench, "run", **words)


@pytest.mark.parametrize("family", ["moshi", "llama", "gemma3", "mamba2"])
def test_an_unchanged_configuration_equals_its_copy(tmp_path, family):
    config = GPTConfig(model_type=family)
    original = load_config(config)
    (tmp_path / "model").mkdir()
    original.to_json_file(tmp_path / "model" / "config.json", use_diff=False)
    checkpoint = Checkpoint(
        path=tmp_path,
        step=1,
        saved_time="",
        world_size=1,
        metadata={},
        files={"model/config.json": (0, ""), "tokenizer/tokenizer.json": (0, "")},
    )
    assert read_model_config(config, checkpoint).model_type == family


def test_weights_from_another_configuration_are_named(bench, trained, originals, caplog):
    words = {"init_from": f"{trained.folder}/4", "config_overrides": "n_layer=1,attn_pdrop=0.2"}
    caplog.set_level("INFO", logger="llm")
    start(bench, "new", **words)
    assert "another configuration: attn_pdrop was 0.0 and is 0.2." in caplog.text


def exported(run: Path, folder: Path) -> dict[str, bytes]:
    """Export the last step, the mean of both steps, and what each generates."""
    assert checkpoints([str(run), "--export", "4", str(folder / "last")]) == 0
    assert checkpoints(["average", str(run), "--last", "2", "--output", str(folder / "mean")]) == 0
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name not in ("README.md", "mean.json")
    }


def written(run: Path, capsys, *words: str) -> str:
    capsys.readouterr()
    assert generate([str(run), *words, "--seed", "1", "--max_new_tokens", "20"]) == 0
    return capsys.readouterr().out


def test_exports_means_and_texts_are_those_of_the_model_that_was_trained(
    trained, originals, tmp_path, capsys
):
    before = exported(trained.folder, tmp_path / "before")
    text = written(trained.folder, capsys, "--checkpoint", "2")
    edit(originals / "model" / "config.json", n_head=4, layer_norm_epsilon=0.1)
    other_tokenizer(originals / "tokenizer")

    assert exported(trained.folder, tmp_path / "after") == before
    assert written(trained.folder, capsys, "--checkpoint", "2") == text
    for name in ("config.json", "tokenizer.json", "model.safetensors", "generation_config.json"):
        assert before[f"last/{name}"] == (trained.folder / name).read_bytes()


@pytest.fixture
def moved(trained, originals, tmp_path, monkeypatch) -> Path:
    """The run in another place, its originals gone, seen from another working directory."""
    place = tmp_path / "place"
    shutil.copytree(trained.folder, place, symlinks=True)
    aside = trained.folder.rename(trained.folder.with_name("aside"))
    shutil.rmtree(originals)
    monkeypatch.chdir(tmp_path)
    yield Path("place")
    aside.rename(trained.folder)


def test_every_program_works_on_a_run_in_another_place(bench, moved, tmp_path, capsys):
    assert checkpoints([str(moved), "--verify"]) == 0
    assert "Every byte was read: no damage." in capsys.readouterr().out
    new = exported(moved, tmp_path / "new")
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        assert new[f"last/{name}"] == (moved / name).read_bytes()
    AutoModelForCausalLM.from_pretrained(tmp_path / "new" / "mean")
    assert written(moved, capsys, "--checkpoint", "4") == written(moved, capsys)
    assert report([str(moved)]) == 0
    assert inspect([str(moved), "--step", "3"]) == 0
    assert "sample 8" in capsys.readouterr().out

    for words in (
        {"output_dir": moved, "resume_from_checkpoint": True},
        {"output_dir": moved, "resume_from_checkpoint": True, "eval_only": True},
        {"output_dir": "branch", "branch_from": f"{moved}/2"},
    ):
        run = start(bench, "moved", **words)
        assert (run.model_config.n_layer, run.model_config.attn_pdrop) == (1, 0.0)
        assert compute_fingerprint(run.tokenizer) == compute_fingerprint(tiny_tokenizer())


def test_a_branch_of_a_run_in_another_place_ends_as_the_run(bench, moved, capsys):
    words = {**options(bench, bench.folder / "originals"), "output_dir": moved.absolute() / "on"}
    branch = bench.train_well("on", branch_from=moved.absolute() / "2", **words)
    own = moved / "on"
    assert "is not a local path: the tokenizer is the copy in" in branch.output
    for name in ("model.safetensors", "config.json", "tokenizer.json"):
        assert (own / name).read_bytes() == (moved / name).read_bytes()
    # Its checkpoints have copies in turn.
    shutil.rmtree(moved / "checkpoints")
    assert written(own, capsys, "--checkpoint", "4") == written(moved, capsys)


def test_checkpoints_of_different_models_are_not_averaged(trained, tmp_path, capsys):
    run = tmp_path / "run"
    shutil.copytree(trained.folder, run, symlinks=True)
    shutil.rmtree(run / "checkpoints" / "step_00000004")
    edit_copies(run, layer_norm_epsilon=0.1)
    shutil.copytree(
        trained.folder / "checkpoints" / "step_00000004", run / "checkpoints" / "step_00000004"
    )

    words = ["average", str(run), "--last", "2", "--output", str(tmp_path / "mean")]
    assert checkpoints(words) == 2
    assert (
        "have different models: layer_norm_epsilon was 0.1 and is 1e-05." in capsys.readouterr().err
    )
    assert not (tmp_path / "mean").exists()


def test_a_copy_that_was_edited_is_damage(trained, tmp_path, capsys):
    run = tmp_path / "run"
    shutil.copytree(trained.folder, run, symlinks=True)
    edit(run / "checkpoints" / "step_00000004" / "model" / "config.json", n_head=4)

    assert checkpoints([str(run), "--verify"]) == 1
    assert "not valid: model/config.json has" in capsys.readouterr().out
    assert checkpoints([str(run), "--export", "4", str(tmp_path / "out")]) == 2
    assert "step_00000004 is damaged: model/config.json has" in capsys.readouterr().err


CONFIGURATION = """
from transformers import GPT2Config

class OwnConfig(GPT2Config):
    model_type = "own"
"""
MODEL = """
from transformers import GPT2LMHeadModel
from .configuration_own import OwnConfig

class OwnForCausalLM(GPT2LMHeadModel):
    config_class = OwnConfig
"""


def test_a_run_keeps_the_python_code_of_its_model(tmp_path, capsys):
    bench = Bench(tmp_path / "bench", lines=60)
    code = {
        "AutoConfig": "configuration_own.OwnConfig",
        "AutoModelForCausalLM": "modeling_own.OwnForCausalLM",
    }
    edit(bench.model / "config.json", model_type="own", auto_map=code)
    (bench.model / "configuration_own.py").write_text(CONFIGURATION)
    (bench.model / "modeling_own.py").write_text(MODEL)
    words = {"trust_remote_code": True, "max_train_steps": 2, "checkpointing_steps": 2}
    run = bench.train_well(**words)

    def resumed() -> seams.Run:
        return bench.read("run", resume_from_checkpoint=True, **words)

    resumed()
    (bench.model / "modeling_own.py").write_text(MODEL + "# edited")
    with pytest.raises(LLMError, match=r"was written: modeling_own\.py has another content"):
        resumed()

    shutil.rmtree(bench.model)
    assert resumed().model_config.model_type == "own"
    export = [str(run.folder), "--export", "2", str(tmp_path / "out"), "--trust_remote_code"]
    assert checkpoints(export) == 0
    assert (tmp_path / "out" / "modeling_own.py").read_text() == MODEL
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        assert (tmp_path / "out" / name).read_bytes() == (run.folder / name).read_bytes()


def test_a_model_from_scratch_ends_at_the_end_of_text_of_its_tokenizer(tmp_path):
    """Llama's own is the id 2, which is another token here."""
    bench = Bench(tmp_path, lines=60, family="llama", bos_token_id=1, eos_token_id=2)
    run = bench.train_well(max_train_steps=1, checkpointing_steps=1)
    assert checkpoints([str(run.folder), "--export", "1", str(tmp_path / "out")]) == 0

    for folder in (run.folder, tmp_path / "out"):
        for name in ("config.json", "generation_config.json"):
            settings = json.loads((folder / name).read_text())
            assert (settings["eos_token_id"], settings.get("bos_token_id")) == (0, None), name
    bench.train_well(max_train_steps=2, resume_from_checkpoint=True)


def test_a_resumed_run_keeps_the_settings_of_its_pretrained_weights(trained, tmp_path):
    base = tmp_path / "base"
    shutil.copytree(trained.folder, base, ignore=shutil.ignore_patterns("checkpoints", ".*"))
    edit(base / "generation_config.json", num_beams=3)
    bench = Bench(tmp_path / "bench", lines=60)
    words = {"model_name_or_path": base, "checkpointing_steps": 1, "max_train_steps": 1}
    bench.train_well(**words)
    shutil.rmtree(base)
    words = {**words, "max_train_steps": 2, "resume_from_checkpoint": True}

    run = bench.train_well(**words)

    assert run.read_json("generation_config.json")["num_beams"] == 3
    assert checkpoints([str(run.folder), "--export", "2", str(tmp_path / "out")]) == 0
    settings = (tmp_path / "out" / "generation_config.json").read_text()
    assert json.loads(settings)["num_beams"] == 3
