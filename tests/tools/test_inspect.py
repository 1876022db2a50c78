from pathlib import Path

import pytest

from llm.data.formats.sidecar import Sidecar, write_sidecar
from llm.prepare.verification import compute_checksums
from llm.tokenizers.load_tokenizer import compute_fingerprint
from llm.tools.inspect import main
from tests.support.token_files import write_flat, write_pair
from tests.support.tokenizers import save_tiny_tokenizer, tiny_tokenizer


def described(prefix, *, tokenizer, tokenizer_fingerprint):
    """Adds a sidecar to a pair of two documents."""
    kinds = ("bin", "idx")
    write_sidecar(
        prefix,
        Sidecar(
            tokenizer=str(tokenizer),
            tokenizer_fingerprint=tokenizer_fingerprint,
            vocab_size=300,
            eos_token_id=0,
            append_eos=True,
            dtype="uint16",
            documents=2,
            tokens=10,
            text_bytes=25,
            empty_documents=4,
            skipped_documents=1,
            largest_token=299,
            sources=["a.jsonl", "b.jsonl"],
            plan="0",
            checksums={kind: compute_checksums(prefix.with_suffix(f".{kind}")) for kind in kinds},
        ),
    )
    return prefix


def shown(capsys, *argv):
    """What the program writes, with runs of spaces as one."""
    assert main([str(word) for word in argv]) == 0
    return [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]


def test_a_pair_is_described_and_its_first_documents_shown(tmp_path, capsys):
    prefix = write_pair(tmp_path / "text", [[5, 6, 7, 0], [8, 0], [9, 9, 9, 9, 9, 0]])

    assert shown(capsys, prefix, "--documents", "2", "--tokens", "3") == [
        f"token file {prefix}",
        "kind .bin and .idx, as Megatron-LM and NeMo read them",
        "documents 3",
        "sequences 3",
        "tokens 12",
        "dtype uint16",
        "size 24 bytes of .bin, 102 of .idx",
        "document length min 2, median 4, mean 4.0, max 6 tokens",
        "documents end all with the token 0",
        "",
        "document 0, 4 tokens",
        "5 6 7 ...",
        "",
        "document 1, 2 tokens",
        "8 0",
    ]


def test_documents_that_end_with_different_tokens_are_reported(tmp_path, capsys):
    prefix = write_pair(tmp_path / "text", [[5, 6], [], [8, 7]])

    lines = shown(capsys, prefix)

    assert "documents end with 2 different tokens (of the first 2)" in lines
    assert "document 1, 0 tokens" in lines


def test_an_empty_pair_is_shown_too(tmp_path, capsys):
    assert "documents 0" in shown(capsys, write_pair(tmp_path / "text", []))

    lines = shown(capsys, write_pair(tmp_path / "text", [[], []]))
    assert "document length min 0, median 0, mean 0.0, max 0 tokens" in lines
    assert not any(line.startswith("documents end") for line in lines)


def test_a_flat_file_is_shown_from_its_beginning(tmp_path, capsys):
    write_flat(tmp_path / "train.bin", list(range(100)))

    assert shown(capsys, tmp_path / "train.bin", "--tokens", "4") == [
        f"token file {tmp_path}/train.bin",
        "kind flat .bin, as nanoGPT reads it",
        "documents not known",
        "tokens 100",
        "dtype uint16",
        "size 200 bytes",
        "",
        "all documents, 100 tokens",
        "0 1 2 3 ...",
    ]


def test_the_sidecar_names_the_tokenizer_and_its_text_is_shown(tmp_path, capsys):
    tokenizer = tiny_tokenizer()
    documents = [[*tokenizer.encode("the \x1b[1mfox"), 0], [*tokenizer.encode("dog"), 0]]
    prefix = write_pair(tmp_path / "text", documents)
    folder = save_tiny_tokenizer(tmp_path / "tokenizer")
    described(prefix, tokenizer=folder, tokenizer_fingerprint=compute_fingerprint(tokenizer))

    lines = shown(capsys, prefix)

    assert "text 25 bytes, 2.500 bytes per token" in lines
    assert "left out 4 empty, 1 unreadable documents" in lines
    assert f"tokenizer {folder} (fingerprint {compute_fingerprint(tokenizer)})" in lines
    assert "vocabulary 300; largest id in use 299" in lines
    assert "end of text 0, appended to each document" in lines
    assert "sources a.jsonl, b.jsonl" in lines
    assert "documents end all with the token 0 '<|endoftext|>'" in lines
    assert r"'the \x1b[1mfox<|endoftext|>'" in lines
    assert lines[-1] == "'dog<|endoftext|>'"


def test_a_tokenizer_other_than_the_files_own_gets_a_warning(tmp_path, capsys):
    prefix = write_pair(tmp_path / "text", [[1, 0]])
    folder = save_tiny_tokenizer(tmp_path / "tokenizer")
    described(prefix, tokenizer=folder, tokenizer_fingerprint="0123456789abcdef")

    assert "were made with 0123456789abcdef: the text may be wrong." in shown(capsys, prefix)[-1]


def test_a_vocabulary_and_merges_pair_decodes_the_file(tmp_path, capsys):
    tokenizer = tiny_tokenizer().backend_tokenizer
    vocab_file, merges_file = tokenizer.model.save(str(tmp_path))
    prefix = write_pair(tmp_path / "text", [tokenizer.encode("the fox").ids])
    described(prefix, tokenizer=f"{vocab_file}, {merges_file}", tokenizer_fingerprint="0")

    assert "'the fox'" in shown(capsys, prefix)

    Path(merges_file).unlink()
    remark = f"Not shown as text: --merges_file {merges_file} does not exist."
    assert shown(capsys, prefix)[-1] == remark


def test_a_folder_with_a_comma_is_not_a_vocabulary_and_merges_pair(tmp_path, capsys):
    folder = save_tiny_tokenizer(tmp_path / "first, second")
    tokenizer = tiny_tokenizer()
    prefix = write_pair(tmp_path / "text", [tokenizer("the fox")["input_ids"]])
    described(prefix, tokenizer=folder, tokenizer_fingerprint=compute_fingerprint(tokenizer))

    assert shown(capsys, prefix)[-1] == "'the fox'"


@pytest.mark.parametrize("name", ["gone.json", "me/not-downloaded"])
def test_ids_are_shown_if_the_tokenizer_is_missing(name, tmp_path, hub, capsys):
    prefix = write_pair(tmp_path / "text", [[1, 0]])
    described(prefix, tokenizer=name, tokenizer_fingerprint="0")

    lines = shown(capsys, prefix)

    assert "1 0" in lines
    assert lines[-1] == (
        f"Not shown as text: The tokenizer {name} is neither a local folder nor in the Hugging "
        "Face Hub's cache; name it in --tokenizer_name to download it."
    )
    assert not [request for request in hub.requests if name in request]


def test_ids_beyond_a_named_tokenizer_are_shown_as_numbers(tmp_path, capsys):
    prefix = write_pair(tmp_path / "text", [tiny_tokenizer().encode("dog"), [400]])
    folder = save_tiny_tokenizer(tmp_path / "tokenizer")

    lines = shown(capsys, prefix, "--tokenizer_name", folder)

    assert "'dog'" in lines
    assert lines[-2:] == ["400", "(ids beyond the tokenizer's 300)"]


def test_verify_reports_success_or_each_fault(tmp_path, capsys):
    prefix = write_pair(tmp_path / "text", [[5, 6, 0], [5, 0]])
    assert shown(capsys, "--verify", prefix) == ["all checks passed"]

    (tmp_path / "text.bin").write_bytes(bytes(8))
    assert main([str(prefix), "--verify"]) == 1
    assert "text.bin is 8 bytes long, not 10" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "No token file is named"),
        (["none"], "There is no token file none"),
        (["--verify", "none"], "There is no token file none"),
        (["one", "two"], "'two' has no option before it"),
        (["--path", "one", "two"], "'two' has no option before it"),
        (["one", "--token", "5"], "did you mean tokens?"),
        (["one", "--documents", "-1"], "--documents must be at least 0, not -1"),
        (["broken"], "does not start with a token file's header"),
        (["text", "--tokenizer_name", "no/such/none.json"], "no/such/none.json"),
        (["text", "--vocab_file", "vocab.json"], "--vocab_file is given without --merges_file"),
    ],
)
def test_unreadable_files_end_with_one_sentence_and_exit_code_2(
    tmp_path, monkeypatch, capsys, argv, message
):
    monkeypatch.chdir(tmp_path)
    write_pair(tmp_path / "text", [[5, 0]])
    (tmp_path / "broken.idx").write_bytes(b"x")
    (tmp_path / "broken.bin").write_bytes(b"x")

    assert main(argv) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith("error: ")
    assert output.err.count("\n") == 1
    assert message in output.err
