import argparse
import gzip
import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from llm.data.workers import num_cores
from llm.prepare.text.sources import find_text_sources
from llm.prepare.text.training_texts import TrainingTexts
from llm.prepare.text_tokenizer import TextTokenizer, load_text_tokenizer
from llm.prepare.train_tokenizer import main
from llm.tokenizers.load_tokenizer import load_tokenizer
from llm.tokenizers.options import TokenizerOptions

CORPUS = Path(argparse.__file__).read_text(encoding="utf-8")
DOCUMENTS = [f"{part}\n" for part in CORPUS.split("\n\n") if part]
SENTENCEPIECE = [
    *("--library", "sentencepiece", "--vocab_size", "600", "--byte_fallback", "--split_digits"),
    *("--pad_id", "0", "--unk_id", "1", "--bos_id", "2", "--eos_id", "3"),
]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    lines = [json.dumps({"id": n, "text": text}) + "\n" for n, text in enumerate(DOCUMENTS)]
    half = len(lines) // 2
    with gzip.open(folder / "a.jsonl.gz", "wt", encoding="utf-8") as file:
        file.writelines(lines[:half])
    (folder / "b.jsonl").write_text("".join(lines[half:]), encoding="utf-8")
    return folder


def train(corpus: Path | str, output: Path, *options: str) -> int:
    return main(["--input", str(corpus), "--output_dir", str(output), *options])


def load(folder: Path) -> TextTokenizer:
    return load_text_tokenizer(TokenizerOptions(tokenizer_name=str(folder)))


def ids(tokenizer: TextTokenizer, text: str) -> list[int]:
    assert tokenizer.backend is not None
    found: list[int] = tokenizer.backend.encode(text, add_special_tokens=False).ids
    return found


def error_of(capsys: pytest.CaptureFixture[str]) -> str:
    return capsys.readouterr().err


def test_byte_level_bpe_is_trained_by_default(corpus, tmp_path, capsys):
    assert train(corpus, tmp_path / "out", "--vocab_size", "500") == 0
    tokenizer = load(tmp_path / "out")

    megabytes = sum(len(text.encode()) for text in DOCUMENTS) / 1e6
    said = capsys.readouterr().out
    assert f"{len(DOCUMENTS)} documents, {megabytes:.1f} MB of text | 500 tokens, " in said
    assert "bytes each on a sample" in said

    assert tokenizer.size == 500
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 0)
    text = "  parser.add_argument(name)\n\n<|endoftext|> \u2603 12"
    assert tokenizer.backend is not None
    assert tokenizer.backend.decode(ids(tokenizer, text)) == text
    assert len(ids(tokenizer, CORPUS)) < 0.5 * len(CORPUS)
    files = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert files == ["tokenizer.json", "tokenizer_config.json"]


def test_folders_trained_by_sentencepiece_give_sentencepieces_ids(corpus, tmp_path):
    spm = pytest.importorskip("sentencepiece")
    assert train(corpus, tmp_path / "out", *SENTENCEPIECE) == 0
    processor = spm.SentencePieceProcessor(model_file=str(tmp_path / "out" / "tokenizer.model"))

    tokenizer = load(tmp_path / "out")
    for text in ["", " ", "\n\tnaïve \u2603 1234  </s> <pad>", *DOCUMENTS]:
        assert ids(tokenizer, text) == processor.encode(text)
    assert tokenizer.size == processor.get_piece_size() == 600
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (2, 3)
    assert [processor.pad_id(), processor.unk_id()] == [0, 1]
    assert processor.decode(processor.encode(" a\n  b ")) == " a\n  b "


@pytest.mark.parametrize("options", [["--vocab_size", "400"], SENTENCEPIECE])
def test_all_loaders_read_the_same_tokenizer_from_the_folder(options, corpus, tmp_path):
    if options is SENTENCEPIECE:
        pytest.importorskip("sentencepiece")
    train(corpus, tmp_path / "out", *options)
    name = str(tmp_path / "out")
    ours = load_tokenizer(TokenizerOptions(tokenizer_name=name))
    loaded = [AutoTokenizer.from_pretrained(name), ours]

    tokenizer = load(tmp_path / "out")
    expected = ids(tokenizer, CORPUS)
    for other in loaded:
        assert other(CORPUS, add_special_tokens=False)["input_ids"] == expected
        assert other.eos_token_id == tokenizer.eos_token_id
        assert len(other) == tokenizer.size


def test_unigram_models_are_trained_by_both_libraries(corpus, tmp_path):
    pytest.importorskip("sentencepiece")
    unigram = ["--model_type", "unigram", "--vocab_size", "600"]
    assert train(corpus, tmp_path / "hf", *unigram) == 0
    assert train(corpus, tmp_path / "sp", *unigram, "--library", "sentencepiece") == 0

    for name in ("hf", "sp"):
        written = json.loads((tmp_path / name / "tokenizer.json").read_text(encoding="utf-8"))
        assert written["model"]["type"] == "Unigram"
        assert load(tmp_path / name).size == 600


@pytest.mark.parametrize(
    "options",
    [
        ["--vocab_size", "400", "--max_sentences", "30"],
        [*SENTENCEPIECE, "--model_type", "unigram"],
    ],
)
def test_the_same_text_gives_the_same_files(options, corpus, tmp_path):
    if options[:2] == SENTENCEPIECE[:2]:
        pytest.importorskip("sentencepiece")
    for name in ("first", "second"):
        assert train(corpus, tmp_path / name, *options) == 0

    for file in (tmp_path / "first").iterdir():
        assert file.read_bytes() == (tmp_path / "second" / file.name).read_bytes()


def test_sentencepiece_bpe_does_not_depend_on_threads(corpus, tmp_path):
    pytest.importorskip("sentencepiece")
    for number in ("1", "3"):
        train(corpus, tmp_path / number, *SENTENCEPIECE, "--num_workers", number)

    models = [(tmp_path / number / "tokenizer.model").read_bytes() for number in ("1", "3")]
    assert models[0] == models[1]


def test_there_are_no_more_threads_than_cores(corpus, tmp_path, capsys):
    threads = ["--vocab_size", "300", "--num_workers", "100000"]
    assert train(corpus, tmp_path / "out", *threads) == 0

    most = max(16, num_cores())
    assert f"taking {most} workers, not 100,000" in capsys.readouterr().out
    assert os.environ["RAYON_NUM_THREADS"] == str(most)


@pytest.mark.parametrize("library", ["huggingface", "sentencepiece"])
def test_split_digits_makes_every_digit_a_token(library, tmp_path):
    pytest.importorskip("sentencepiece")
    (tmp_path / "years.txt").write_text("in 1999 and 2000\n" * 300 + CORPUS, encoding="utf-8")
    options = ["--library", library, "--vocab_size", "500"]
    train(tmp_path / "years.txt", tmp_path / "joined", *options)
    train(tmp_path / "years.txt", tmp_path / "split", *options, "--split_digits")

    assert len(ids(load(tmp_path / "joined"), "1999")) <= 2
    assert len(ids(load(tmp_path / "split"), "1999")) >= 4


def test_the_option_chooses_the_normalization(corpus, tmp_path):
    pytest.importorskip("sentencepiece")
    train(corpus, tmp_path / "kept", "--vocab_size", "300")
    train(corpus, tmp_path / "nfkc", "--vocab_size", "300", "--normalization", "nfkc")
    sentencepiece = ["--library", "sentencepiece", "--normalization", "nmt_nfkc_cf"]
    train(corpus, tmp_path / "folded", "--vocab_size", "300", *sentencepiece)

    assert ids(load(tmp_path / "nfkc"), "\ufb01") == ids(load(tmp_path / "nfkc"), "fi")
    assert ids(load(tmp_path / "kept"), "\ufb01") != ids(load(tmp_path / "kept"), "fi")
    folded = load(tmp_path / "folded")
    assert ids(folded, "  THE \n name ") == ids(folded, "the name")


def test_a_sample_is_drawn_evenly_and_by_the_seed(corpus):
    def draw(seed: int) -> list[str]:
        sources = find_text_sources([str(corpus)], text_column=None)
        return list(TrainingTexts(sources, lines=False, max_sentences=40, seed=seed))

    first, second = draw(1), draw(2)
    assert len(first) == len(set(first)) == 40
    assert set(first) <= set(DOCUMENTS)
    assert first == draw(1)
    assert first != second
    half = set(DOCUMENTS[: len(DOCUMENTS) // 2])
    assert 8 <= sum(text in half for text in first) <= 32


def test_lines_are_cut_to_the_length_limit_of_sentencepiece(tmp_path):
    words = "\u2603\u2603\u2603\u2603 " * 3000
    (tmp_path / "a.jsonl").write_text(
        json.dumps({"text": f"first\r\n\n{words}"}) + "\n" + json.dumps({"text": "x" * 2500})
    )
    sources = find_text_sources([str(tmp_path)], text_column=None)
    lines = list(TrainingTexts(sources, lines=True, max_sentences=None, seed=0))

    assert lines[0] == "first"
    assert "".join(lines[1:]) == words + "x" * 2500
    assert max(len(line.encode()) for line in lines) <= 4192
    assert [len(line) for line in lines[-3:]] == [1000, 1000, 500]
    # Cut at spaces where there are some.
    assert all(line.endswith("\u2603") for line in lines[1:-4])


def test_words_of_more_letters_than_a_trainer_can_take_are_cut(tmp_path):
    texts = ["the fox\n" * 900, "x" * 900, "a picture: " + "A" * 5000 + " ends", " " * 3000 + "\n"]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    sources = find_text_sources([str(tmp_path)], text_column=None)
    pieces = list(TrainingTexts(sources, lines=False, max_sentences=None, seed=0))

    assert pieces[:2] == texts[:2]
    assert "".join(pieces) == "".join(texts)
    assert max(len(word) for piece in pieces for word in re.findall(r"\S+|\s+", piece)) < 2000


def test_a_small_text_gives_a_smaller_vocabulary_with_a_note(tmp_path, capsys):
    (tmp_path / "a.txt").write_text("to be or not to be")
    assert train(tmp_path / "a.txt", tmp_path / "out", "--vocab_size", "1000") == 0

    # The token <|endoftext|>, 256 bytes, and what stands there twice: "to", " b" and " be".
    said = capsys.readouterr().out
    assert "The text fills only 260 of the 1,000 tokens of --vocab_size." in said
    assert "1 document, " in said
    assert load(tmp_path / "out").size == 260


@pytest.mark.parametrize("model_type", ["bpe", "unigram"])
def test_the_error_names_the_largest_vocabulary_that_the_text_can_fill(
    model_type, corpus, tmp_path, capsys
):
    pytest.importorskip("sentencepiece")
    options = ["--library", "sentencepiece", "--model_type", model_type]
    assert train(corpus, tmp_path / "out", *options, "--vocab_size", "90000") == 2
    said = error_of(capsys)
    assert "--vocab_size 90000 is more than this text can fill: set it to" in said
    assert not list(tmp_path.glob("*out*"))

    largest = said.partition("set it to ")[2].split()[0]
    assert train(corpus, tmp_path / "out", *options, "--vocab_size", largest) == 0
    assert load(tmp_path / "out").size == int(largest)


SP = ("--library", "sentencepiece")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--vocab_size", "256"], "--vocab_size 256 is too small: the 256 bytes and <|endoftext|>"),
        (["--vocab_size", str(10**9)], "--vocab_size must be at most 10000000, not 1000000000"),
        (["--vocab_size", str(10**400)], "--vocab_size must be at most 10000000, not 100000"),
        ([*SP, "--vocab_size", "30"], "--vocab_size 30 is too small: the letters of this text"),
        ([*SP, "--vocab_size", "200", "--byte_fallback"], "the letters of this text and the"),
        (["--vocab_size", "0"], "--vocab_size must be at least 1, not 0"),
        ([*SP, "--pad_id", "1"], "--pad_id is the id of another special token, or beyond"),
        ([*SP, "--unk_id", "-1"], "--unk_id must be at least 0, not -1"),
        ([*SP, "--eos_id", "32768"], "--eos_id is the id of another special token, or beyond"),
        ([*SP, "--bos_id", "-2"], "--bos_id must be at least -1, not -2"),
        ([*SP, "--normalization", "nfc"], "--library sentencepiece has no --normalization nfc"),
        (["--normalization", "nmt_nfkc"], "--library huggingface has no --normalization nmt_nfkc"),
        (["--byte_fallback"], "--byte_fallback is for --library sentencepiece alone"),
        (["--eos_id", "0"], "--eos_id is for --library sentencepiece alone"),
        (["--character_coverage", "0.5"], "--character_coverage must be at least 0.98"),
        (["--json_key", "body"], "the record has no key 'body', only 'id', 'text'; mend"),
        (["--library", "spacy"], "--library expects"),
        (["--vocab_sise", "9"], "did you mean vocab_size"),
    ],
)
def test_invalid_options_are_refused_in_one_sentence(options, words, corpus, tmp_path, capsys):
    pytest.importorskip("sentencepiece")
    assert train(corpus, tmp_path / "out", *options) == 2

    said = error_of(capsys)
    assert words in said
    assert said.startswith("error: ") or "\nerror: " in said
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--output_dir", "out"], "No text is named"),
        (["--input", "*.nothing", "--output_dir", "out"], "--input *.nothing matches no file"),
        (["--input", "missing.txt", "--output_dir", "out"], "missing.txt does not exist"),
        (["--input", "missing.txt"], "No output is named"),
    ],
)
def test_missing_input_and_output_are_named(argv, words, capsys):
    assert main(argv) == 2
    assert words in error_of(capsys)


@pytest.mark.parametrize("library", ["huggingface", "sentencepiece"])
@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('{"text": "good"}\n{"text": \n', "line 2"),
        ('{"text": ""}\n{"text": null}\n', "No text was found in"),
    ],
)
def test_unreadable_text_is_refused_as_by_every_program(library, content, words, tmp_path, capsys):
    pytest.importorskip("sentencepiece")
    (tmp_path / "a.jsonl").write_text(content)
    assert train(tmp_path / "a.jsonl", tmp_path / "out", "--library", library) == 2

    sentence = error_of(capsys)
    assert words in sentence
    assert "--on_error" not in sentence  # the program has no such option
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]


def test_an_existing_folder_is_replaced_only_with_overwrite(corpus, tmp_path, capsys):
    train(corpus, tmp_path / "out", "--vocab_size", "300")
    before = load(tmp_path / "out").fingerprint

    assert train(corpus, tmp_path / "out", "--vocab_size", "310") == 2
    assert "exists already; pass --overwrite" in error_of(capsys)
    assert load(tmp_path / "out").fingerprint == before

    assert train(corpus, tmp_path / "out", "--vocab_size", "310", "--overwrite") == 0
    assert load(tmp_path / "out").size == 310
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_folder_with_other_files_is_never_replaced(corpus, tmp_path, capsys):
    assert train(corpus, corpus, "--vocab_size", "300", "--overwrite") == 2

    assert "holds more than a tokenizer from here (a.jsonl.gz)" in error_of(capsys)
    assert sorted(path.name for path in corpus.iterdir()) == ["a.jsonl.gz", "b.jsonl"]


@pytest.mark.parametrize("options", [["--vocab_size", "400"], SENTENCEPIECE])
def test_a_full_disk_is_one_sentence_and_leaves_nothing(options, corpus, tmp_path, capsys):
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4000, before[1]))
    try:
        assert train(corpus, tmp_path / "out", *options) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)

    assert f"error: --output_dir {tmp_path / 'out'} cannot be written: File" in error_of(capsys)
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_training_has_left_is_removed_by_the_next_one(corpus, tmp_path):
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    host = socket.gethostname()
    for process in (child, os.getppid()):
        (tmp_path / f".out.{host}.{process}.unfinished").mkdir()

    assert train(corpus, tmp_path / "out", "--vocab_size", "300") == 0

    alive = f".out.{host}.{os.getppid()}.unfinished"
    assert sorted(path.name for path in tmp_path.iterdir()) == [alive, "out"]


def test_a_text_in_the_output_folder_is_never_replaced(tmp_path, capsys):
    (tmp_path / "out").mkdir()
    text = tmp_path / "out" / "tokenizer.json"
    text.write_text('{"text": "the only copy"}')

    assert train(text, tmp_path / "out", "--vocab_size", "300", "--overwrite") == 2

    assert "out, which would replace it; name another folder" in error_of(capsys)
    assert text.read_text() == '{"text": "the only copy"}'


def test_a_folder_that_appears_during_the_training_is_left_alone(
    corpus, tmp_path, monkeypatch, capsys
):
    def report(*arguments: Any) -> str:
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "thesis.txt").write_text("precious")
        return ""

    monkeypatch.setattr("llm.prepare.train_tokenizer._describe_result", report)

    assert train(corpus, tmp_path / "out", "--vocab_size", "300") == 2
    assert "thesis.txt), so --overwrite does not replace it" in error_of(capsys)
    assert (tmp_path / "out" / "thesis.txt").read_text() == "precious"


def test_a_failure_leaves_the_old_folder_and_nothing_else(corpus, tmp_path, monkeypatch):
    train(corpus, tmp_path / "out", "--vocab_size", "300")
    before = load(tmp_path / "out").fingerprint

    def fail(*arguments: Any) -> str:
        raise RuntimeError("out of luck")

    monkeypatch.setattr("llm.prepare.train_tokenizer._describe_result", fail)
    with pytest.raises(RuntimeError, match="out of luck"):
        train(corpus, tmp_path / "out", "--vocab_size", "310", "--overwrite")
    assert load(tmp_path / "out").fingerprint == before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_missing_package_is_named_with_its_pip_line(corpus, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    assert train(corpus, tmp_path / "out", *SENTENCEPIECE) == 2

    assert "pip install sentencepiece" in error_of(capsys)


def test_training_loads_neither_torch_nor_transformers(corpus, tmp_path):
    code = (
        "import sys; from llm.prepare.train_tokenizer import main\n"
        "print(main(sys.argv[1:]), {'torch', 'transformers', 'datasets'} & {*sys.modules})"
    )
    words = ["--input", str(corpus), "--output_dir", str(tmp_path / "out"), "--vocab_size=300"]
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True)

    assert done.stdout.splitlines()[-1] == "0 set()"
    assert load(tmp_path / "out").size == 300
