"""Bad input gets one clear sentence, once, and exit code 2; and it harms nothing."""

import json
from pathlib import Path

import pytest

from llm.config.toml import read_toml
from llm.trainers.gpt.extensions import GPTConfig
from tests.support.models import tiny_config, tiny_model
from tests.support.refusals import assert_refused
from tests.support.training import Bench, Run, write_model_folder


@pytest.fixture(scope="module")
def bench(tmp_path_factory) -> Bench:
    return Bench(tmp_path_factory.mktemp("bench"))


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """A folder with a model's weights."""
    folder = write_model_folder(tmp_path_factory.mktemp("trained"))
    tiny_model(tiny_config("gpt2")).save_pretrained(folder)
    return folder


def test_no_data(bench):
    assert_refused(bench, train_file=None, words=["--dataset_name or --train_file"])


def test_a_missing_file(bench):
    assert_refused(bench, train_file="nowhere.txt", words=["nowhere.txt"])


def test_an_empty_file(bench, tmp_path):
    (tmp_path / "empty.txt").write_text("")
    assert_refused(bench, train_file=tmp_path / "empty.txt", words=["empty.txt"])


def test_a_file_that_is_not_utf8_names_the_line(bench, tmp_path):
    (tmp_path / "latin.txt").write_bytes(b"fine\nfine\ncaf\xe9\n")
    assert_refused(bench, train_file=tmp_path / "latin.txt", words=["latin.txt", "line 3", "UTF-8"])


def test_a_file_of_an_unknown_kind_lists_the_kinds(bench, tmp_path):
    (tmp_path / "text.docx").write_text("text")
    assert_refused(bench, train_file=tmp_path / "text.docx", words=["docx", "jsonl", "parquet"])


def test_a_missing_text_column_lists_the_columns(bench, tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"title": "a", "body": "b"}\n')
    assert_refused(
        bench,
        train_file=tmp_path / "rows.jsonl",
        text_column="content",
        words=["content", "title", "body"],
    )


def test_broken_json_names_the_line(bench, tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n{"text": \n')
    assert_refused(bench, train_file=tmp_path / "rows.jsonl", words=["rows.jsonl", "line 2"])


def test_a_model_folder_that_is_none(bench, tmp_path):
    assert_refused(
        bench, model_name_or_path=tmp_path, words=["--model_name_or_path", "without a config.json"]
    )


def test_a_missing_tokenizer(bench, tmp_path):
    config = json.loads((bench.model / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert_refused(bench, model_name_or_path=tmp_path, words=["tokenizer", "--tokenizer_name"])


def test_a_block_longer_than_the_models_positions(bench):
    assert_refused(bench, block_size=65, words=["--block_size 65", "64 positions"])


def test_a_text_too_short_for_one_window(bench, tmp_path):
    (tmp_path / "short.txt").write_text("a few words\n" * 2)
    assert_refused(
        bench,
        train_file=tmp_path / "short.txt",
        validation_split_percentage=0,
        words=["tokens", "32"],
    )


def test_a_text_too_short_for_the_validation_split(bench, tmp_path):
    (tmp_path / "short.txt").write_text("a line of text\n" * 5)
    assert_refused(
        bench,
        train_file=tmp_path / "short.txt",
        words=["--validation_split_percentage 5", "5 rows"],
    )


def test_an_unusable_folder_is_refused_before_the_text_is_read(bench, trained, tmp_path):
    (tmp_path / "file").write_text("mine")
    for options in ({}, {"eval_only": True, "model_name_or_path": trained}):
        run = bench.train(
            output_dir=tmp_path / "file" / "run", data_cache_dir=tmp_path / "cache", **options
        )
        assert run.codes == [2]
        assert f"{tmp_path}/file is a file; name a folder" in run.output
        assert not (tmp_path / "cache").exists()


def test_batch_sizes_that_do_not_divide(bench):
    assert_refused(bench, global_batch_size=6, words=["--global_batch_size 6", "not a multiple"])


def test_an_unknown_override_names_its_neighbours(bench):
    assert_refused(bench, config_overrides="n_layers=2", words=["n_layers", "n_layer"])


def test_an_unknown_architecture_names_its_neighbours(bench):
    assert_refused(
        bench,
        model_name_or_path=None,
        model_type="gtp2",
        tokenizer_name=bench.model,
        words=["gtp2", "gpt2"],
    )


def test_an_attention_kernel_that_is_not_there(bench):
    assert_refused(
        bench,
        attention_implementation="flash_attention_2",
        words=["--attention_implementation flash_attention_2"],
    )


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (
            {"eval_steps": 2, "eval_metrics": "accuracy", "eval_ema": True, "ema_decay": 0.9},
            "--eval_steps and --eval_metrics and --eval_ema",
        ),
        (
            {"eval_tokens": "1K", "save_top_k": 1, "checkpointing_steps": 2},
            "--eval_tokens and --save_top_k",
        ),
        ({"eval_only": True}, "--eval_only"),
    ],
)
def test_an_evaluation_without_validation_data(bench, trained, options, named):
    assert_refused(
        bench,
        model_name_or_path=trained,
        validation_split_percentage=0,
        words=[f"There is no validation data for {named}; give --validation_file"],
        **options,
    )


def test_an_evaluation_of_an_average_that_no_checkpoint_has(bench, trained):
    options = {"eval_only": True, "eval_ema": True, "ema_decay": 0.9}
    words = ["--eval_ema has no moving average", "--resume_from_checkpoint"]
    assert_refused(bench, model_name_or_path=trained, words=words, **options)


def test_an_evaluation_of_random_weights(bench):
    assert_refused(bench, eval_only=True, words=["--eval_only has no trained weights"])


def test_fp8_on_a_cpu(bench):
    assert_refused(bench, mixed_precision="fp8", words=["--mixed_precision fp8", "bf16"])


def test_an_unknown_tracker(bench):
    assert_refused(bench, report_to="tensorbord", words=["--report_to tensorbord", "tensorboard"])


def test_a_tracker_that_is_not_installed_prints_its_pip_line(bench):
    assert_refused(bench, report_to="wandb", words=["--report_to wandb", "pip install"])


def test_phases_longer_than_the_run(bench):
    assert_refused(
        bench,
        lr_scheduler_type="warmup_stable_decay",
        num_warmup_steps=19,
        num_decay_steps=5,
        words=["longer than the run of 20 steps"],
    )


def test_a_damaged_checkpoint_that_was_named(bench, tmp_path):
    words = ["--resume_from_checkpoint", "not a checkpoint", "manifest.json"]
    assert_refused(bench, resume_from_checkpoint=tmp_path, words=words)


def test_a_cache_folder_that_cannot_be_written(bench, tmp_path):
    (tmp_path / "file").write_text("")
    assert_refused(bench, data_cache_dir=tmp_path / "file", words=["--data_cache_dir", "file"])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"learning_rate": "fast"}, ["--learning_rate", "'fast'"]),
        ({"block_size": 65}, ["--block_size 65"]),
        ({"train_file": "nowhere.txt"}, ["nowhere.txt"]),
        ({"mixed_precision": "fp8"}, ["--mixed_precision fp8"]),
    ],
)
def test_two_ranks_print_an_error_once(bench, options, words):
    assert_refused(bench, ranks=2, words=words, **options)


def test_two_ranks_print_a_tokenisation_error_of_one_rank_once(bench, tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n' * 50 + '{"text": \n')
    assert_refused(
        bench, ranks=2, train_file=tmp_path / "rows.jsonl", words=["rows.jsonl", "line 51"]
    )


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
    taken = bench.train_well("taken-too", max_train_steps=1)
    recorded = dict.fromkeys(read_toml(GPTConfig, twice.folder / "config.toml"))
    again = {**recorded, "config": twice.folder / "config.toml", "output_dir": taken.folder}

    run = bench.train("taken-too", **again)

    assert run.codes == [2]
    assert "holds a run already" in run.output
    assert len(taken.losses) == 1


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
    options = {option: named, "overwrite_output_dir": True}

    run = bench.train(
        "again", **{"train_file": None if option == "data_path" else bench.text, **options}
    )

    assert run.codes == [2]
    assert f"--{option} {named} is in --output_dir {twice.folder}" in run.output
    assert (twice.folder / "checkpoints" / "mine.txt").read_bytes() == bench.text.read_bytes()
    assert len(twice.losses) == 3


@pytest.mark.parametrize("how", [{}, {"overwrite_output_dir": True}])
def test_a_model_that_lies_in_the_folder_is_left_as_it_is(bench, twice, how):
    folder = bench.folder / "exported"
    folder.mkdir(exist_ok=True)
    for name in ("config.json", "model.safetensors", "README.md"):
        (folder / name).write_text("mine")

    run = bench.train("exported", **how)

    assert run.codes == [2]
    assert "holds no run, but files that this run would replace" in run.output
    assert "(README.md, config.json, model.safetensors)" in run.output
    assert {path.read_text() for path in folder.iterdir()} == {"mine"}
