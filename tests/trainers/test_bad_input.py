"""Bad input gets one clear sentence, once, and exit code 2; and it harms nothing."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from llm.checkpoint.run_folder import RunFolder
from llm.config.toml import read_toml
from llm.errors import ConfigError, LLMError
from llm.trainers.gpt.extensions import GPTConfig
from tests.support.models import tiny_config, tiny_model
from tests.support.training import Bench, Run, assert_refused, write_model_folder


@pytest.fixture(scope="module")
def bench(tmp_path_factory) -> Bench:
    return Bench(tmp_path_factory.mktemp("bench"))


@pytest.fixture(scope="module")
def trained(bench) -> Path:
    """A folder with a model's weights."""
    folder = write_model_folder(bench.folder / "trained")
    tiny_model(tiny_config("gpt2")).save_pretrained(folder)
    return folder


WITHOUT_TRAINING: list[tuple[dict[str, Any], list[str]]] = [
    (
        {
            **{"model_name_or_path": None, "tokenizer_name": "{}/model", "model_type": "bert"},
            "config_overrides": "hidden_size=32,num_hidden_layers=1,num_attention_heads=2",
        },
        ["In this bert model, tokens see later tokens", "--config_overrides is_decoder=true"],
    ),
    (
        {"attention_implementation": "flash_attention_2"},
        ["--attention_implementation flash_attention_2"],
    ),
    ({"report_to": "tensorbord"}, ["--report_to tensorbord", "tensorboard"]),
    ({"train_file": "{}/words.txt", "validation_split_percentage": 0}, ["tokens", "32"]),
    ({"learning_rate": "fast"}, ["--learning_rate", "'fast'"]),
]


@pytest.mark.parametrize(("options", "words"), WITHOUT_TRAINING)
def test_bad_input_is_refused_in_one_sentence(bench, options, words):
    """Where it is noticed: among the options, the inputs, in the text, or in the model."""
    (bench.folder / "words.txt").write_text("a few words\n" * 2)
    assert_refused(bench, words=words, **in_folder(bench, options))


def in_folder(bench: Bench, options: dict[str, Any]) -> dict[str, Any]:
    """The same options, with the bench's folder in place of {}."""
    return {k: v.format(bench.folder) if isinstance(v, str) else v for k, v in options.items()}


TRAINED: dict[str, Any] = {"model_name_or_path": "{}/trained"}
NO_VALIDATION = TRAINED | {"validation_split_percentage": 0}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"model_name_or_path": "{}/untokenized"}, "holds no tokenizer.*--tokenizer_name"),
        ({"block_size": 65}, "--block_size 65 is more than the 64 positions"),
        ({"global_batch_size": 6}, "--global_batch_size 6 is not a multiple"),
        (
            {
                **{"eval_steps": 2, "eval_metrics": "accuracy", "eval_ema": True, "ema_decay": 0.9},
                **NO_VALIDATION,
            },
            "no validation data for --eval_interval and --eval_metrics and --eval_ema; give",
        ),
        (
            {"eval_tokens": "1K", "save_top_k": 1, "checkpointing_steps": 2, **NO_VALIDATION},
            "no validation data for --save_top_k and --eval_interval; give --validation_file",
        ),
        ({"eval_only": True, **NO_VALIDATION}, "no validation data for --eval_only; give"),
        (
            {"eval_only": True, "eval_ema": True, "ema_decay": 0.9, **TRAINED},
            "--eval_ema has no moving average.*--resume_from_checkpoint",
        ),
        ({"eval_only": True}, "--eval_only has no trained weights"),
        ({"mixed_precision": "fp8"}, "--mixed_precision fp8.*bf16"),
        ({"report_to": "wandb"}, "--report_to wandb.*pip install"),
        (
            {
                "lr_scheduler_type": "warmup_stable_decay",
                "num_warmup_steps": 19,
                "num_decay_steps": 5,
            },
            "longer than the run of 20 steps",
        ),
        (
            {"resume_from_checkpoint": "{}/trained"},
            r"--resume_from_checkpoint.*not a checkpoint.*manifest\.json",
        ),
    ],
)
def test_inputs_that_do_not_fit_are_refused_before_training(bench, trained, options, said):
    (bench.folder / "untokenized").mkdir(exist_ok=True)
    shutil.copy(bench.model / "config.json", bench.folder / "untokenized")
    with pytest.raises(LLMError, match=said):
        bench.read(**in_folder(bench, options))


def test_an_unusable_folder_is_refused_before_the_text_is_read(bench, trained, tmp_path):
    (tmp_path / "file").write_text("mine")
    for options in ({}, {"eval_only": True, "model_name_or_path": trained}):
        folders = {"output_dir": tmp_path / "file" / "run", "data_cache_dir": tmp_path / "cache"}
        with pytest.raises(ConfigError, match=f"{tmp_path}/file is a file; name a folder"):
            bench.read(**folders, **options)
        assert not (tmp_path / "cache").exists()


def test_two_ranks_print_an_error_once(bench):
    assert_refused(bench, ranks=2, words=["nowhere.txt"], train_file="nowhere.txt")


def test_two_ranks_print_a_tokenisation_error_of_one_rank_once(bench, tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n' * 50 + '{"text": \n')
    assert_refused(
        bench, ranks=2, train_file=tmp_path / "rows.jsonl", words=["rows.jsonl", "line 51"]
    )


def test_two_ranks_refuse_a_folder_in_use_with_one_error(bench):
    folder = RunFolder(bench.folder / "busy")
    with folder.lock():
        assert_refused(bench, ranks=2, words=["busy is in use by process"], output_dir=folder.path)


def test_a_folder_that_holds_another_run_is_left_as_it_is(bench):
    first = bench.train_well("taken", max_train_steps=2)
    before = {path.name: path.read_bytes() for path in first.folder.iterdir() if path.is_file()}

    second = bench.train("taken", max_train_steps=3)

    assert second.codes == [2]
    assert "holds a run already" in second.output
    assert {p.name: p.read_bytes() for p in second.folder.iterdir() if p.is_file()} == before


@pytest.fixture(scope="module")
def twice(bench) -> Run:
    """A run that another one has overwritten, beside files of the user's own."""
    first = bench.train_well("again", max_train_steps=2, checkpointing_steps=1)
    (first.folder / "checkpoints" / "mine.txt").write_bytes(bench.text.read_bytes())
    return bench.train_well("again", max_train_steps=3, overwrite_output_dir=True)


def test_overwriting_starts_over_and_keeps_the_users_files(twice):
    assert len(twice.losses) == 3
    assert [path.name for path in (twice.folder / "checkpoints").iterdir()] == ["mine.txt"]


def test_the_written_configuration_overwrites_no_other_run(bench, twice):
    taken = shutil.copytree(twice.folder, bench.folder / "taken-too")
    recorded = dict.fromkeys(read_toml(GPTConfig, twice.folder / "config.toml"))
    again = {**recorded, "config": twice.folder / "config.toml", "output_dir": taken}
    with pytest.raises(ConfigError, match="holds a run already"):
        bench.read(**again)


@pytest.mark.parametrize(
    "option", ["train_file", "validation_file", "data_path", "tokenizer_name", "config"]
)
def test_an_input_in_the_run_that_is_overwritten_is_refused(bench, twice, option):
    named = {
        "data_path": twice.folder / "checkpoints" / "tokens",
        "tokenizer_name": twice.folder / "tokenizer.json",
        "config": twice.folder / "config.toml",
    }.get(option, twice.folder / "checkpoints" / "mine.txt")
    if option == "data_path":
        named.with_suffix(".bin").write_text("")
    text = {"train_file": None if option == "data_path" else bench.text}
    said = f"--{option} {named} is in --output_dir {twice.folder}"
    with pytest.raises(ConfigError, match=said):
        bench.read("again", overwrite_output_dir=True, **text | {option: named})


@pytest.mark.parametrize("how", [{}, {"overwrite_output_dir": True}])
def test_a_model_that_lies_in_the_folder_is_not_replaced(bench, how):
    folder = bench.folder / "exported"
    folder.mkdir(exist_ok=True)
    for name in ("config.json", "model.safetensors", "README.md"):
        (folder / name).write_text("mine")

    said = r"holds no run, but files .* \(README.md, config.json, model.safetensors\)"
    with pytest.raises(ConfigError, match=said):
        bench.read("exported", **how)
