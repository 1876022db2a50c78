import gzip
import os
import sys
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import ByT5Tokenizer

from llm.data.formats.flat import FlatTokenFile
from llm.data.formats.megatron import TokenFile
from llm.data.formats.sidecar import read_sidecar
from llm.prepare import prepare_files
from llm.prepare.prepare import main
from llm.prepare.verification import find_token_file_faults
from llm.tokenizers.load_tokenizer import load_tokenizer
from llm.tokenizers.options import TokenizerOptions
from tests.support.texts import PACK, expected_pair, json_lines, names, pair, write
from tests.support.tokenizers import tiny_tokenizer

TEXTS = [
    "the quick brown fox",
    "",
    "caf\u00e9 \u4f60\u597d \U0001f642\nand a second line",
    "the end <|endoftext|> of a text",
    *[f"document {number}: " + "the dog sleeps, " * (number % 9) for number in range(40)],
]


pytestmark = pytest.mark.usefixtures("at_home")


def prepare(*argv, tokenizer=("--tokenizer_name", "tokenizer")):
    return main([str(word) for word in [*argv, *tokenizer]])


def test_json_lines_become_the_files_that_megatron_would_write(tmp_path, capsys):
    write(tmp_path / "a.jsonl", json_lines(TEXTS))

    assert prepare("--input", "a.jsonl", "--output_prefix", "out/wiki", "--workers", 1) == 0

    assert pair("out/wiki_text_document") == expected_pair(tmp_path / "e", TEXTS)
    assert names("out") == [f"wiki_text_document.{kind}" for kind in ("bin", "idx", "json")]
    assert find_token_file_faults(tmp_path / "out" / "wiki_text_document") == []
    sidecar = read_sidecar(tmp_path / "out" / "wiki_text_document")
    assert (sidecar.documents, sidecar.empty_documents) == (len(TEXTS) - 1, 1)
    assert sidecar.text_bytes == sum(len(text.encode()) for text in TEXTS)
    assert sidecar.sources == ["a.jsonl"]
    assert capsys.readouterr().out.splitlines()[-1] == "wrote out/wiki_text_document.bin"


@pytest.mark.parametrize(
    ("workers", "part_bytes", "library"),
    [
        (1, 97, "gigatoken"),
        (2, 97, "tokenizers"),
        (3, 1000, "gigatoken"),
        (1, 1 << 26, "tokenizers"),
        (2, 1 << 26, "gigatoken"),
    ],
)
def test_the_bytes_do_not_depend_on_workers_shards_or_encoder(
    tmp_path, monkeypatch, workers, part_bytes, library
):
    monkeypatch.setattr(prepare_files, "SHARD_BYTES", part_bytes)
    if library == "tokenizers":
        monkeypatch.setitem(sys.modules, "gigatoken", None)
    write(tmp_path / "a.jsonl", json_lines(TEXTS))

    assert prepare("--input", "a.jsonl", "--output_prefix", "wiki", "--workers", workers) == 0

    assert pair("wiki_text_document") == expected_pair(tmp_path / "e", TEXTS)


def test_a_folder_is_one_split_of_a_data_set(tmp_path, capsys):
    (tmp_path / "set").mkdir()
    for number in range(4):
        texts = TEXTS[number * 11 : (number + 1) * 11]
        write(tmp_path / "set" / f"train-{number}.jsonl", json_lines(texts))
    write(tmp_path / "set" / "dev.jsonl", json_lines(["for validation"]))
    argv = ["--dataset_name", "./set", "--output_prefix"]

    assert prepare(*argv, "wiki", "--workers", 2) == 0
    assert prepare(*argv, "dev", "--dataset_split", "validation", "--streaming") == 0

    assert pair("wiki_text_document") == expected_pair(tmp_path / "e", TEXTS)
    assert pair("dev_text_document") == expected_pair(tmp_path / "e", ["for validation"])
    assert "--streaming has no effect: ./set is a local folder" in capsys.readouterr().out


def test_a_data_set_that_changes_is_read_again_though_its_time_stays(tmp_path):
    for number, text in enumerate(["old", "new"]):
        (tmp_path / "set").mkdir(exist_ok=True)
        os.utime(write(tmp_path / "set" / "a.jsonl", json_lines([text])), ns=(0, 0))

        assert prepare("--dataset_name", "set", "--output_prefix", f"v{number}") == 0

        assert pair(f"v{number}_text_document") == expected_pair(tmp_path / "e", [text])


def test_a_compressed_file_of_a_data_set_that_is_cut_short_is_refused(tmp_path, capsys):
    (tmp_path / "set").mkdir()
    whole = PACK[".zst"](json_lines(TEXTS).encode())
    write(tmp_path / "set" / "train.jsonl.zst", whole[: len(whole) // 2])

    assert prepare("--dataset_name", "set", "--output_prefix", "wiki") == 2

    assert "set/train.jsonl.zst is cut short" in capsys.readouterr().err


def test_the_names_of_missing_values_in_a_csv_file_are_texts(tmp_path):
    texts = ["the fox", "NA", "null", "None", "nan", "N/A", "the end"]
    (tmp_path / "set").mkdir()
    write(tmp_path / "set" / "train.csv", "\n".join(["text", *texts]))

    assert prepare("--dataset_name", "set", "--output_prefix", "wiki") == 0

    assert pair("wiki_text_document") == expected_pair(tmp_path / "e", texts)


def test_folders_patterns_and_columns_can_be_named(tmp_path):
    (tmp_path / "in").mkdir()
    write(tmp_path / "in" / "b.csv", "id,body\n1,two\n")
    write(tmp_path / "in" / "a.csv", "body,id\none,1\n")
    argv = ["--json_key", "body", "--workers", 1, "--output_prefix"]

    assert prepare("--input", "in", *argv, "x") == 0
    assert prepare("--input", "in/b.*", "in/a.csv", *argv, "y") == 0

    assert pair("x_body_document") == expected_pair(tmp_path / "e", ["one", "two"])
    assert pair("y_body_document") == expected_pair(tmp_path / "e", ["two", "one"])


def test_a_text_file_is_one_document_by_default(tmp_path):
    write(tmp_path / "a.txt", "the fox\n\ndog\n")
    write(tmp_path / "b.txt", "the end")

    assert prepare("--input", "a.txt", "b.txt", "--output_prefix", "wiki") == 0

    file = TokenFile(tmp_path / "wiki_text_document")
    assert file.num_documents == 2
    assert tiny_tokenizer().decode(file.tokens) == (
        "the fox\n\ndog\n<|endoftext|>the end<|endoftext|>"
    )


def tokenizer_with_a_beginning():
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    tokenizer.save_pretrained("with_beginning")
    return ("--tokenizer_name", "with_beginning")


def test_documents_begin_with_bos_if_an_option_says_so(tmp_path):
    write(tmp_path / "a.txt", "the fox\n\ndog\n")
    write(tmp_path / "b.jsonl", json_lines(["one", "", "two"]))
    argv = ["--input", "a.txt", "b.jsonl", "--output_prefix", "wiki", "--prepend_bos"]

    assert prepare(*argv, tokenizer=tokenizer_with_a_beginning()) == 0

    file = TokenFile(tmp_path / "wiki_text_document")
    documents = ["<s>the fox\n\ndog\n", "<s>one", "<s>two"]
    assert file.num_documents == 3
    assert load_tokenizer(TokenizerOptions(tokenizer_name="with_beginning")).decode(
        file.tokens
    ) == "".join(f"{document}<|endoftext|>" for document in documents)
    sidecar = read_sidecar(tmp_path / "wiki_text_document")
    assert sidecar is not None
    assert sidecar.prepend_bos
    assert find_token_file_faults(tmp_path / "wiki_text_document") == []


def test_a_tokenizer_without_a_beginning_of_text_is_refused(tmp_path, capsys):
    write(tmp_path / "a.jsonl", json_lines(["one"]))

    assert prepare("--input", "a.jsonl", "--output_prefix", "wiki", "--prepend_bos") == 2

    assert "no token that begins a text; leave --prepend_bos out" in capsys.readouterr().err


def test_special_tokens_in_the_text_are_text_unless_an_option_allows_them(tmp_path):
    write(tmp_path / "a.jsonl", json_lines(["fox<|endoftext|>dog"]))
    argv = ["--input", "a.jsonl", "--no_append_eod", "--output_prefix"]

    assert prepare(*argv, "text") == 0
    assert prepare(*argv, "token", "--allow_special_tokens") == 0

    assert 0 not in TokenFile(tmp_path / "text_text_document").tokens
    tokens = TokenFile(tmp_path / "token_text_document").tokens
    assert np.count_nonzero(tokens == 0) == 1
    assert tiny_tokenizer().decode(tokens) == "fox<|endoftext|>dog"


def test_a_bad_record_stops_the_preparation_or_is_counted(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(prepare_files, "SHARD_BYTES", 60)
    lines = (
        json_lines(["one", "two"])
        + '{"body": "x"}\n{"text": 5}\n{"text"\n'
        + json_lines(["", "three"])
    )
    write(tmp_path / "a.jsonl", lines.encode() + b'{"text": "\xff"}\n')
    argv = ["--input", "a.jsonl", "--output_prefix", "wiki", "--workers", 1]

    assert prepare(*argv) == 2
    assert capsys.readouterr().err.splitlines()[-1] == (
        "error: a.jsonl, line 3: the record has no key 'text', only 'body'; mend the line, or "
        "choose another --text_column. To skip it, prepare the text with --on_error skip."
    )
    assert not list(tmp_path.glob("wiki_text_document.*[!s]"))

    assert prepare(*argv, "--on_error", "skip") == 0
    sidecar = read_sidecar(tmp_path / "wiki_text_document")
    assert (sidecar.documents, sidecar.empty_documents, sidecar.skipped_documents) == (3, 1, 4)
    assert "1 empty and 4 skipped documents" in capsys.readouterr().out


def test_a_file_of_bad_lines_is_refused_with_the_number_of_skipped_ones(tmp_path, capsys):
    write(tmp_path / "a.jsonl", '{"body": "x"}\n{"text": 5}\n{"text"\n{"text": ""}\n')
    argv = ["--input", "a.jsonl", "--output_prefix", "wiki", "--workers", 1]

    assert prepare(*argv, "--on_error", "skip") == 2

    output = capsys.readouterr()
    assert output.out.splitlines() == [
        "skipped: a.jsonl, line 1: the record has no key 'text', only 'body'; mend the line, or "
        "choose another --text_column.",
        "skipped: a.jsonl, line 2: the text is a value of type int, not a string; mend it, or "
        "choose another --text_column.",
        "skipped: a.jsonl, line 3: malformed JSON, Expecting ':' delimiter (column 8); mend the "
        "line.",
    ]
    assert output.err == "error: a.jsonl holds no text: 1 empty and 3 skipped documents.\n"


def test_each_input_may_have_an_output_of_its_own_name(tmp_path, capsys):
    for name, text in (("one.jsonl.gz", "one"), ("two.jsonl", "two")):
        content = json_lines([text]).encode()
        write(tmp_path / name, gzip.compress(content) if name.endswith("gz") else content)

    argv = ["--input", "one.jsonl.gz", "two.jsonl", "--output_prefix", "out/wiki"]

    assert prepare(*argv, "--output_per_input") == 0
    for name in ("one", "two"):
        assert pair(f"out/wiki_{name}_text_document") == expected_pair(tmp_path / "e", [name])
    assert len(names("out")) == 6

    (tmp_path / "more").mkdir()
    write(tmp_path / "more" / "two.jsonl", json_lines(["one"]))
    assert prepare(*argv, "--input", "more", "two.jsonl", "--output_per_input") == 2
    said = "would write more/two.jsonl and two.jsonl to the same out/wiki_two"
    assert said in capsys.readouterr().err


def test_the_output_of_an_input_keeps_the_dots_in_its_name(tmp_path):
    for number in (0, 1):
        name = f"c4-train.0000{number}-of-01024.json.gz"
        write(tmp_path / name, gzip.compress(json_lines([f"shard {number}"]).encode()))

    assert prepare("--input", "c4-*", "--output_prefix", "out", "--output_per_input") == 0

    for number in (0, 1):
        prefix = f"out_c4-train.0000{number}-of-01024_text_document"
        assert pair(prefix) == expected_pair(tmp_path / "e", [f"shard {number}"])


def test_documents_are_shuffled_by_the_seed_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(prepare_files, "SHARD_BYTES", 500)
    write(tmp_path / "a.jsonl", json_lines(TEXTS))
    argv = ["--input", "a.jsonl", "--shuffle", "documents", "--output_prefix"]

    assert prepare(*argv, "a", "--seed", 1, "--workers", 1) == 0
    assert prepare(*argv, "b", "--seed", 1, "--workers", 3) == 0
    assert prepare(*argv, "c", "--seed", 2, "--workers", 2) == 0

    assert pair("a_text_document") == pair("b_text_document") != pair("c_text_document")
    plain = expected_pair(tmp_path / "e", TEXTS)
    assert sorted(pair("a_text_document")[0]) == sorted(plain[0])
    assert pair("a_text_document")[0] != plain[0]


def tokenizer_of(num_tokens):
    backend = Tokenizer(models.WordLevel({f"w{id}": id for id in range(num_tokens)}, "w0"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.save("words.json")
    return ("--tokenizer_name", "words.json", "--no_append_eos")


def test_ids_with_gaps_take_the_bytes_of_the_largest_id(tmp_path):
    backend = Tokenizer(models.WordLevel({"the": 0, "fox": 1, "far": 70_000}, "the"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.save("words.json")
    write(tmp_path / "a.jsonl", json_lines(["fox far"]))
    argv = ["--input", "a.jsonl", "--output_prefix", "wiki", "--workers", 1, "--no_append_eos"]

    assert prepare(*argv, tokenizer=("--tokenizer_name", "words.json")) == 0

    file = TokenFile(tmp_path / "wiki_text_document")
    assert (file.tokens.dtype, file.tokens.tolist()) == ("int32", [1, 70_000])
    assert find_token_file_faults(tmp_path / "wiki_text_document") == []


def test_a_worker_passes_on_that_the_tokenizer_failed_on_a_text(tmp_path, capfd):
    """Its panic cannot be pickled."""
    backend = Tokenizer(models.WordLevel({"the": 0}, "the"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("(x+x+)+y"), "isolated")
    backend.save("words.json")
    for name in "ab":
        write(tmp_path / f"{name}.jsonl", json_lines(["the", "x" * 40]))
    argv = ["--input", "a.jsonl", "b.jsonl", "--output_prefix", "wiki", "--workers", 2]

    assert prepare(*argv, "--no_append_eos", tokenizer=("--tokenizer_name", "words.json")) == 2

    message = capfd.readouterr().err
    assert message.count("error: The tokenizer words.json cannot encode the text that begins") == 1
    assert "Traceback" not in message
    assert "panicked" not in message


@pytest.mark.parametrize(("num_tokens", "code"), [(65_536, 0), (65_537, 2)])
def test_nanogpt_has_no_room_for_more_than_65536_ids(tmp_path, capsys, num_tokens, code):
    write(tmp_path / "a.jsonl", json_lines([f"w{num_tokens - 1} w1"]))
    argv = ["--input", "a.jsonl", "--format", "nanogpt", "--output_prefix", "wiki", "--workers", 1]
    argv += ["--validation_split_percentage", 0]

    assert prepare(*argv, tokenizer=tokenizer_of(num_tokens)) == code

    if code:
        assert "holds ids below 65,536, and the tokenizer has 65,537" in capsys.readouterr().err
    else:
        assert FlatTokenFile(Path("wiki/train.bin")).tokens.tolist() == [65_535, 1]


def test_vocabulary_and_merges_make_a_tokenizer(tmp_path):
    tiny_tokenizer().backend_tokenizer.model.save(".")
    write(tmp_path / "a.jsonl", json_lines(["the fox", "the dog"]))

    pair_of_files = ("--vocab_file", "vocab.json", "--merge_file", "merges.txt")

    assert prepare("--input", "a.jsonl", "--output_prefix", "wiki", tokenizer=pair_of_files) == 0
    assert pair("wiki_text_document") == expected_pair(tmp_path / "e", ["the fox", "the dog"])


def test_a_slow_tokenizer_writes_the_same_files_and_logs_a_note(tmp_path, capsys):
    tokenizer = ByT5Tokenizer()
    tokenizer.save_pretrained("slow")
    write(tmp_path / "a.jsonl", json_lines(["fox</s>", "dog"]))
    argv = ["--input", "a.jsonl", "--output_prefix", "wiki", "--workers", 2]

    assert prepare(*argv, tokenizer=("--tokenizer_name", "slow")) == 0

    ids = [[byte + 3 for byte in text.encode()] + [1] for text in ("fox</s>", "dog")]
    assert TokenFile(tmp_path / "wiki_text_document").tokens.tolist() == ids[0] + ids[1]
    assert "this is a slow tokenizer, in Python" in capsys.readouterr().out


def test_progress_is_logged_at_the_given_interval(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(prepare_files, "SHARD_BYTES", 500)
    write(tmp_path / "a.jsonl", json_lines(TEXTS))
    argv = ["--input", "a.jsonl", "--output_prefix", "wiki", "--workers", 1]

    assert prepare(*argv, "--log_seconds", 0.0001) == 0

    lines = [line for line in capsys.readouterr().out.splitlines() if "documents/s" in line]
    assert len(lines) > 3
    assert "| 100.0% done | 0:00:00 left" in lines[-1]
