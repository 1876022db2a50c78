"""Training from token files that were prepared before: alone, as blends, on any ranks."""

import itertools
import os
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llm.data.order import WindowSampler
from llm.errors import LLMError
from llm.tokenizers.load_tokenizer import compute_fingerprint
from llm.trainers.gpt.extensions import GPTConfig
from tests.support.ranks import run_ranks
from tests.support.recovery import without_times
from tests.support.token_files import (
    describe,
    random_documents,
    write_flat,
    write_pair,
    write_parts,
)
from tests.support.tokenizers import tiny_tokenizer
from tests.support.training import NO_DROPOUT, Bench, Run, assert_refused


@pytest.fixture(scope="module")
def bench(tmp_path_factory) -> Bench:
    bench = Bench(tmp_path_factory.mktemp("bench"), lines=2, **NO_DROPOUT)
    # Ids 1 to 100 and 150 to 249: what a source has taught shows in the loss on the other.
    write_pair(bench.folder / "wiki_text_document", random_documents(200, seed=1))
    write_pair(bench.folder / "code_text_document", random_documents(60, seed=2, first_id=150))
    return bench


def words(bench: Bench, *items: float | str) -> list[str]:
    """Names in the bench's folder, and weights."""
    return [str(bench.folder / item) if isinstance(item, str) else str(item) for item in items]


def blend(bench: Bench) -> list[str]:
    return words(bench, 0.7, "wiki_text_document", 0.3, "code_text_document")


def train(bench: Bench, name: str, **options) -> Run:
    return bench.train_well(name, train_file=None, **options)


@pytest.fixture(scope="module")
def blended(bench) -> Run:
    return train(
        bench, "blended", data_path=blend(bench), split="90,10,0", per_device_train_batch_size=8
    )


def test_a_blend_trains_and_logs_the_samples_of_each_source(blended):
    assert len(blended.losses) == 20
    assert blended.losses[-1] < blended.losses[0]
    for line in (
        r"training data wiki_text_document \(70\.00%\): 180 documents, [\d,]+ tokens, \d+ windows",
        r"training data code_text_document \(30\.00%\): 54 documents",
        r"validation data code_text_document \(30\.00%\): 6 documents",
        r"source wiki_text_document will serve 112 samples \(70\.00%\), [\d.]+ epochs of its data",
        r"source code_text_document served 48 samples \(30\.00%\), [\d.]+ epochs of its data",
    ):
        assert re.search(line, blended.output), line


def test_the_validation_loss_is_the_mean_of_the_sources_by_weight(blended):
    last = blended.metrics[-1]
    wiki, code = last["eval_loss/wiki_text_document"], last["eval_loss/code_text_document"]

    assert wiki != code
    assert last["eval_loss"] == pytest.approx(0.7 * wiki + 0.3 * code)
    assert blended.read_json("all_results.json")["eval_loss/code_text_document"] == code


@pytest.mark.extended
def test_two_ranks_train_on_the_same_samples_as_one(bench, blended):
    run = train(bench, "two", ranks=2, data_path=blend(bench), split="90,10,0")

    assert run.losses == pytest.approx(blended.losses, rel=1e-5)
    assert run.metrics[-1]["eval_loss"] == pytest.approx(blended.metrics[-1]["eval_loss"], rel=1e-5)


def test_a_blend_resumes_from_its_middle_bit_for_bit(bench):
    options = {"data_path": blend(bench), "checkpointing_steps": 7, "max_train_steps": 14}
    options |= {"reset_position_ids": True, "reset_attention_mask": True, "in_memory": True}
    straight = train(bench, "straight", split="9,1", **options)
    shutil.copytree(straight.folder, bench.folder / "resumed")
    shutil.rmtree(bench.folder / "resumed" / "checkpoints" / "step_00000014")
    (bench.folder / "resumed" / "model.safetensors").unlink()

    resumed = train(bench, "resumed", split="9,1", resume_from_checkpoint=True, **options)

    assert "at step 7" in resumed.output
    assert "in memory:" in resumed.output
    assert without_times(resumed) == without_times(straight)


def test_resuming_with_another_blend_is_refused(bench):
    options = {"split": "9,1", "checkpointing_steps": 2, "max_train_steps": 2}
    train(bench, "other", data_path=blend(bench), **options)
    halves = words(bench, 0.5, "wiki_text_document", 0.5, "code_text_document")
    again = {"train_file": None, "resume_from_checkpoint": True, **options}
    with pytest.raises(LLMError, match="data_path was"):
        bench.read("other", data_path=halves, **again)


def test_a_text_and_its_token_files_give_the_same_losses(bench):
    """The files of the cache, taken by name."""
    (bench.folder / "long.txt").write_text("the quick brown fox jumps over the lazy dog. " * 200)
    options = {"max_train_steps": 4, "train_file": bench.folder / "long.txt"}
    text = bench.train_well("text", validation_split_percentage=0, **options)
    (prefix,) = (bench.folder / "cache").glob("*/tokens.bin")

    files = train(bench, "files", train_data_path=[prefix.with_suffix("")], max_train_steps=4)

    assert files.losses == text.losses
    assert "eval_loss" not in files.metrics[-1]


def test_flat_files_train_and_evaluate(bench):
    tokens = [token for document in random_documents(100, seed=3) for token in document]
    write_flat(bench.folder / "train.bin", tokens)
    write_flat(bench.folder / "val.bin", tokens[:300])

    run = train(
        bench,
        "flat",
        train_data_path=words(bench, "train.bin"),
        valid_data_path=words(bench, "val.bin"),
        max_train_steps=2,
        reset_attention_mask=True,
    )

    assert f"training data: {len(tokens):,} tokens" in run.output
    assert len(run.losses) == 2


def test_token_files_alone_can_be_evaluated(bench, blended):
    run = train(
        bench,
        "evaluated",
        model_name_or_path=blended.folder,
        eval_only=True,
        valid_data_path=words(bench, "code_text_document"),
        max_eval_steps=3,
    )
    assert run.read_json("eval_results.json")["loss"] > 0


def test_an_epoch_of_a_blend_has_the_samples_of_all_its_sources(bench):
    inputs = bench.read(
        train_file=None, data_path=blend(bench), max_train_steps=None, num_train_epochs=2
    )

    windows = sum(part.stream.num_tokens // 32 for part in inputs.corpus.train)
    assert inputs.batch_plan.num_windows == windows
    assert inputs.batch_plan.total_samples == 2 * windows


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"data_path": ("data/wiki_v1.2",)}, "tiny-wiki_v1.2"),
        ({"data_path": (0.7, "data/wiki", 0.2, "data/code", 0.1, "x")}, "tiny-wiki+2"),
        ({"train_data_path": ("data/train.bin",)}, "tiny-train"),
    ],
)
def test_a_run_is_named_after_its_first_source(options, name):
    from llm.trainers.gpt.output_folder import choose_default_output_dir

    config = GPTConfig(model_name_or_path="models/tiny", **options)
    assert Path(choose_default_output_dir(config)) == Path("runs") / name


@pytest.mark.parametrize(
    ("blend", "options", "sentence"),
    [
        (["nan", "wiki"], {}, "must be a finite number, not nan"),
        ([0, "wiki", 0, "code"], {}, "every source the weight 0"),
        (["nowhere"], {}, "no token file nowhere"),
        (["code"], {"split": "999,1,0"}, "no documents for validation of .*60 doc"),
        (["wiki"], {"split": "0,1,0"}, "--split 0,1,0 leaves nothing to train on"),
        (
            ["wiki"],
            {"split": "1", "save_top_k": 1, "checkpointing_steps": 1},
            "There is no validation data for --save_top_k",
        ),
        (
            ["endless"],
            {"reset_attention_mask": True},
            "none of its first 100 documents ends with the id 0",
        ),
    ],
)
def test_bad_weights_missing_files_and_empty_splits_are_refused(bench, blend, options, sentence):
    write_pair(bench.folder / "endless_text_document", [[1, 2, 3] * 30] * 100)
    names = {name: str(bench.folder / f"{name}_text_document") for name in ("wiki", "code")}
    names["endless"] = str(bench.folder / "endless_text_document")
    words = [names.get(word, word) for word in blend]
    with pytest.raises(LLMError, match=sentence):
        bench.read(train_file=None, data_path=words, **options)


def test_token_files_of_another_tokenizer_are_refused_on_two_ranks_once(bench):
    prefix = write_pair(bench.folder / "theirs", random_documents(100, seed=4))
    describe(prefix, fingerprint="theirs", largest_token=101)
    sentence = "pass --ignore_tokenizer_mismatch to train all the same"
    assert_refused(bench, ranks=2, words=[sentence], train_file=None, data_path=[prefix])

    assert train(
        bench, "forced", data_path=[prefix], ignore_tokenizer_mismatch=True, max_train_steps=2
    ).losses
    describe(prefix, fingerprint=compute_fingerprint(tiny_tokenizer()), largest_token=101)
    assert train(bench, "same", data_path=[prefix], max_train_steps=2).losses


def test_an_id_beyond_the_vocabulary_ends_the_run_in_a_sentence(bench):
    prefix = write_pair(bench.folder / "large", [[5] * 640, *[[400] * 64] * 2])

    run = bench.train("large", train_file=None, data_path=[prefix], split="1")

    assert run.codes == [2]
    assert f"error: {prefix}.bin holds the token id 400" in run.output
    assert "Traceback" not in run.output
    assert run.read_json("status.json")["status"] == "failed"


def test_an_invalid_id_that_only_rank_1_reads_is_reported_by_it(bench):
    """Of the first step's two windows, one a rank, the second one holds the id."""
    seed = 1
    starts = WindowSampler(num_tokens=128, block_size=32, seed=seed).locate_windows(
        np.array([0, 1])
    )
    tokens = np.full(128, 5)
    tokens[starts[1] + 5] = 400
    prefix = write_pair(bench.folder / "second", [tokens.tolist()])
    options = {"data_path": [prefix], "split": "1", "seed": seed, "max_train_steps": 1}

    run = bench.train(
        "second-rank", ranks=2, train_file=None, per_device_train_batch_size=1, **options
    )

    assert run.codes[1] == 2
    assert f"[rank 1] error: {prefix}.bin holds the token id 400" in run.output


def test_a_model_that_cannot_keep_documents_apart_is_refused(bench, tmp_path):
    assert_refused(
        Bench(tmp_path, lines=2, family="mamba"),
        words=["--reset_attention_mask cannot keep documents apart in mamba"],
        train_file=None,
        data_path=words(bench, "wiki_text_document"),
        reset_attention_mask=True,
    )


def train_and_cut(argv: list[str], path: Path) -> int:
    """Train; the file of the training data is cut before the third batch is read."""
    from llm.data.corpus import TokenStream
    from llm.trainers.gpt import main

    windows = TokenStream.read_windows
    calls = itertools.count(1)

    def cut_and_read(stream: TokenStream, *arguments: Any) -> Any:
        if next(calls) == 3:  # in the thread that reads, so that no other read is under way
            os.truncate(path, 100)
        return windows(stream, *arguments)

    TokenStream.read_windows = cut_and_read
    return main.main(argv)


def test_a_token_file_that_is_cut_during_training_ends_the_run(bench):
    prefix = write_pair(bench.folder / "cut", random_documents(200, seed=1))
    argv = bench.command("cut-run", train_file=None, train_data_path=prefix)

    run = Run(bench.folder / "cut-run", run_ranks(train_and_cut, 1, argv, Path(f"{prefix}.bin")))

    assert run.codes == [2], run.output
    assert f"error: {prefix}.bin was cut while it was in use: 100 of its " in run.output
    status = run.read_json("status.json")
    assert (status["status"], status["reason"][:9]) == ("failed", "DataError")


@pytest.mark.extended
@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.layouts), 2])
def test_parts_and_their_joined_file_train_alike_and_resume_each_other(bench, ranks):
    documents = random_documents(60, seed=4)
    write_pair(bench.folder / "joined", documents)
    write_parts(bench.folder / "parts", documents, [7, 0, 30, 1, 22])
    options = {"split": "9,1", "ranks": ranks, "max_train_steps": 3, "checkpointing_steps": 2}
    runs = {
        form: train(bench, f"{form}-{ranks}", data_path=words(bench, form), **options)
        for form in ("joined", "parts")
    }
    assert runs["parts"].losses == runs["joined"].losses
    for form, other in (("joined", "parts"), ("parts", "joined")):
        shutil.rmtree(runs[form].folder / "checkpoints" / "step_00000003")
        (runs[form].folder / "model.safetensors").unlink()
        again = train(
            bench,
            f"{form}-{ranks}",
            data_path=words(bench, other),
            resume_from_checkpoint=True,
            change_on_resume="data_path",
            **options,
        )
        assert "at step 2" in again.output
        assert again.losses[-1] == runs["joined"].losses[-1]


def test_a_run_that_names_no_tokenizer_takes_the_one_of_its_token_files(bench, caplog):
    prefix = bench.folder / "recorded_text_document"
    write_pair(prefix, random_documents(60, seed=3))
    options = {"model_name_or_path": None, "train_file": None, "data_path": prefix}
    options |= {"model_type": "gpt2", "config_overrides": "n_layer=1,n_embd=32,n_head=2"}
    with pytest.raises(LLMError, match="No tokenizer is named: give --tokenizer_name"):
        bench.read(**options)
    with pytest.raises(LLMError, match=r"There is no token file .*recorded: .*text_document"):
        bench.read(**options | {"data_path": bench.folder / "recorded"})
    made_by = {"fingerprint": compute_fingerprint(tiny_tokenizer()), "largest_token": 319}
    describe(prefix, tokenizer=str(bench.model), **made_by)

    with caplog.at_level("INFO", logger="llm"):
        run = bench.read(**options)

    assert run.config.tokenizer_name == str(bench.model)
    assert compute_fingerprint(run.tokenizer) == made_by["fingerprint"]
    assert f"tokenizer: {bench.model}, which {prefix}.json names" in caplog.text
