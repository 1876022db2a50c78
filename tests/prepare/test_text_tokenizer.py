import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers
from transformers import (
    BertTokenizer,
    ByT5Tokenizer,
    GPT2Tokenizer,
    PreTrainedTokenizerFast,
)

from llm.errors import ConfigError
from llm.prepare.text_tokenizer import (
    TextTokenizer,
    load_text_tokenizer,
    wrap_transformers_tokenizer,
)
from llm.tokenizers.load_tokenizer import load_tokenizer
from llm.tokenizers.options import TokenizerOptions
from tests.support.tokenizers import tiny_tokenizer

TEXT = "The king <|endoftext|> said:  to be, or not.\n\tnaïve café 12345 <pad></s>"


def load(**options: Any) -> TextTokenizer:
    return load_text_tokenizer(TokenizerOptions(**options))


def load_by_transformers(**options: Any) -> TextTokenizer:
    tokenizer = load_tokenizer(TokenizerOptions(**options))
    return wrap_transformers_tokenizer(tokenizer, str(options.get("tokenizer_name")))


def ids(tokenizer: TextTokenizer, text: str = TEXT) -> list[int]:
    if tokenizer.backend is None:
        assert tokenizer.encode_slow is not None
        return tokenizer.encode_slow(text)
    found: list[int] = tokenizer.backend.encode(text, add_special_tokens=False).ids
    return found


def saved_folder(folder: Path) -> dict[str, Any]:
    tiny_tokenizer().save_pretrained(folder)
    return {"tokenizer_name": str(folder)}


def folder_of_another_pad_token(folder: Path) -> dict[str, Any]:
    saved_folder(folder)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["pad_token"] = "<pad>"
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return {"tokenizer_name": str(folder)}


def folder_of_version_4(folder: Path) -> dict[str, Any]:
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens([AddedToken("<pad>", special=True)])
    tokenizer.add_tokens(["naïve"])
    tokenizer.save_pretrained(folder)
    decoder = tokenizer.backend_tokenizer.get_added_tokens_decoder()
    config = {
        "added_tokens_decoder": {str(id): t.__getstate__() for id, t in decoder.items()},
        "bos_token": "<|endoftext|>",
        "eos_token": {**decoder[0].__getstate__(), "__type": "AddedToken"},
        "pad_token": "<pad>",
        "add_bos_token": True,
        "additional_special_tokens": ["<pad>"],
        "model_max_length": 1024,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "special_tokens_map.json").write_text('{"unk_token": "<unk>"}')
    return {"tokenizer_name": str(folder)}


def folder_of_other_properties(folder: Path) -> dict[str, Any]:
    folder_of_version_4(folder)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    for token in config["added_tokens_decoder"].values():
        token["lstrip"] = True
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return {"tokenizer_name": str(folder)}


def folder_of_a_version_before_4_34(folder: Path) -> dict[str, Any]:
    saved_folder(folder)
    config = {"tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    names = {"eos_token": "<|endoftext|>", "pad_token": "<pad>"}
    (folder / "special_tokens_map.json").write_text(json.dumps(names))
    (folder / "added_tokens.json").write_text('{"</s>": 301, "<pad>": 300}')
    return {"tokenizer_name": str(folder)}


def folder_of_gpt2(folder: Path) -> dict[str, Any]:
    tiny_tokenizer().backend_tokenizer.model.save(str(folder))
    pair = {"vocab": str(folder / "vocab.json"), "merges": str(folder / "merges.txt")}
    GPT2Tokenizer(**pair).save_pretrained(folder)
    return {"tokenizer_name": str(folder)}


def folder_with_a_model_type(folder: Path) -> dict[str, Any]:
    saved_folder(folder)
    (folder / "config.json").write_text('{"model_type": "gpt2"}')
    return {"tokenizer_name": str(folder)}


def lone_file(folder: Path) -> dict[str, Any]:
    tiny_tokenizer().backend_tokenizer.save(str(folder / "any.json"))
    return {"tokenizer_name": str(folder / "any.json")}


def lone_file_that_truncates_and_pads(folder: Path) -> dict[str, Any]:
    backend = tiny_tokenizer().backend_tokenizer
    backend.enable_truncation(5)
    backend.enable_padding(length=90, pad_token="<pad>")
    backend.save(str(folder / "any.json"))
    return {"tokenizer_name": str(folder / "any.json")}


def file_in_a_described_folder(folder: Path) -> dict[str, Any]:
    saved_folder(folder)
    return {"tokenizer_name": str(folder / "tokenizer.json")}


def word_pieces(folder: Path) -> dict[str, Any]:
    words = ["[UNK]", "[CLS]", "[SEP]", "[PAD]", "[MASK]", "the", "king", "##s", "to", "be", ","]
    vocab = {word: id for id, word in enumerate(words)}
    BertTokenizer(vocab=vocab).save_pretrained(folder)
    return {"tokenizer_name": str(folder)}


def bytes_in_python(folder: Path) -> dict[str, Any]:
    ByT5Tokenizer().save_pretrained(folder)
    return {"tokenizer_name": str(folder)}


def sentencepiece_model(folder: Path) -> dict[str, Any]:
    spm = pytest.importorskip("sentencepiece")
    spm.SentencePieceTrainer.train(
        sentence_iterator=iter(Path(json.__file__).read_text().splitlines()),
        model_prefix=str(folder / "any"),
        vocab_size=400,
        model_type="bpe",
        byte_fallback=True,
        user_defined_symbols=["king"],
        pad_id=3,
        minloglevel=2,
    )
    return {"tokenizer_name": str(folder / "any.model")}


def folder_of_a_sentencepiece_model(folder: Path) -> dict[str, Any]:
    sentencepiece_model(folder)
    return {"tokenizer_name": str(folder)}


def saved_sentencepiece_model(folder: Path) -> dict[str, Any]:
    options = sentencepiece_model(folder)
    loaded = load_tokenizer(TokenizerOptions(**options))
    loaded.save_pretrained(folder / "saved")
    return {"tokenizer_name": str(folder / "saved")}


def pair_of_files(folder: Path) -> dict[str, Any]:
    tiny_tokenizer().backend_tokenizer.model.save(str(folder))
    return {"vocab_file": str(folder / "vocab.json"), "merges_file": str(folder / "merges.txt")}


def folder_of_a_pair(folder: Path) -> dict[str, Any]:
    pair_of_files(folder)
    return {"tokenizer_name": str(folder)}


DIRECT = [
    pair_of_files,
    folder_of_a_pair,
    lone_file,
    saved_folder,
    file_in_a_described_folder,
    sentencepiece_model,
    folder_of_a_sentencepiece_model,
    saved_sentencepiece_model,
]
ASKED = [
    folder_of_version_4,
    lone_file_that_truncates_and_pads,
    folder_of_another_pad_token,
    folder_of_other_properties,
    folder_of_a_version_before_4_34,
    folder_of_gpt2,
    folder_with_a_model_type,
    word_pieces,
    bytes_in_python,
]


@pytest.mark.parametrize("make", DIRECT + ASKED)
def test_transformers_gives_the_same_tokenizer(make, tmp_path):
    options = make(tmp_path)
    tokenizer = load(**options)
    reference = load_by_transformers(**options)

    assert ids(tokenizer) == ids(reference)
    assert tokenizer.fingerprint == reference.fingerprint
    assert tokenizer.eos_token_id == reference.eos_token_id
    assert tokenizer.bos_token_id == reference.bos_token_id
    assert tokenizer.size == reference.size
    assert (tokenizer.backend is None) == (tokenizer.encode_slow is not None)


def test_plain_files_are_read_without_torch_and_transformers(tmp_path):
    options = []
    for make in DIRECT:
        (tmp_path / make.__name__).mkdir()
        options.append(make(tmp_path / make.__name__))
    program = (
        "import json, sys; from llm.prepare.text_tokenizer import load_text_tokenizer\n"
        "from llm.tokenizers.options import TokenizerOptions\n"
        "for options in json.loads(sys.argv[1]):\n"
        "    print(load_text_tokenizer(TokenizerOptions(**options)).fingerprint)\n"
        "print({'torch', 'transformers', 'datasets'} & {*sys.modules})"
    )
    command = [sys.executable, "-c", program, json.dumps(options)]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout

    fingerprints = [load_by_transformers(**each).fingerprint for each in options]
    assert output.splitlines() == [*fingerprints, "set()"]


def test_a_sentencepiece_model_is_the_same_tokenizer_however_it_is_named(tmp_path):
    kinds = (sentencepiece_model, folder_of_a_sentencepiece_model, saved_sentencepiece_model)
    loaded = []
    for number, make in enumerate(kinds):
        (tmp_path / str(number)).mkdir()
        loaded.append(load(**make(tmp_path / str(number))))

    assert {tokenizer.fingerprint for tokenizer in loaded} == {loaded[0].fingerprint}
    assert [tokenizer.size for tokenizer in loaded] == [400] * 3
    assert [tokenizer.eos_token_id for tokenizer in loaded] == [2] * 3
    assert [tokenizer.bos_token_id for tokenizer in loaded] == [1] * 3


def test_the_name_of_a_special_token_is_text_until_it_is_allowed(tmp_path):
    tokenizer = load(**saved_folder(tmp_path))
    assert tokenizer.backend is not None
    assert tokenizer.eos_token_id not in ids(tokenizer)

    tokenizer.backend.encode_special_tokens = False
    assert tokenizer.eos_token_id in ids(tokenizer)


def test_texts_are_encoded_whole(tmp_path):
    tokenizer = load(**lone_file_that_truncates_and_pads(tmp_path))

    assert len(ids(tokenizer, "q" * 1000)) == 1000
    assert len(ids(tokenizer, "q")) == 1


def test_gpt2s_end_of_text_is_added_to_a_vocabulary_without_it(tmp_path):
    (tmp_path / "vocab.json").write_text('{"a": 0, "b": 1, "ab": 2}')
    (tmp_path / "merges.txt").write_text("#version: 0.2\na b\n")
    options = {
        "vocab_file": str(tmp_path / "vocab.json"),
        "merges_file": str(tmp_path / "merges.txt"),
    }
    tokenizer = load(**options)

    assert (tokenizer.eos_token_id, tokenizer.size) == (3, 4)
    assert ids(tokenizer, "aba") == [2, 0]
    assert tokenizer.fingerprint == load_by_transformers(**options).fingerprint


@pytest.mark.parametrize(
    ("make", "file", "content", "words"),
    [
        (saved_folder, "tokenizer.json", "[", "The tokenizer in the folder .* cannot be read"),
        (saved_folder, "tokenizer_config.json", "[", "The tokenizer in the folder .* cannot be"),
        (lone_file, "any.json", '{"version":', "any.json is not a tokenizer.json file"),
        (pair_of_files, "merges.txt", "a b c", "are not GPT-2's"),
    ],
)
def test_a_broken_file_is_refused_in_the_words_of_load_tokenizer(
    make, file, content, words, tmp_path
):
    options = make(tmp_path)
    (tmp_path / file).write_text(content)

    for loader in (load, load_by_transformers):
        with pytest.raises(ConfigError, match=words):
            loader(**options)


def test_no_choice_is_refused():
    with pytest.raises(ConfigError, match="No tokenizer is named"):
        load()


def changed(change: Callable[[Tokenizer], None], eos: str = "<|endoftext|>") -> str:
    backend = Tokenizer.from_str(tiny_tokenizer().backend_tokenizer.to_str())
    change(backend)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=eos)
    return wrap_transformers_tokenizer(tokenizer, "changed").fingerprint


def without_its_last_merge(backend: Tokenizer) -> None:
    model = json.loads(backend.to_str())["model"]
    merges = [tuple(pair) for pair in model["merges"]]
    backend.model = models.BPE(model["vocab"], merges[:-1])


CHANGES: dict[str, Callable[[Tokenizer], Any]] = {
    "merges": without_its_last_merge,
    "normalizer": lambda backend: setattr(backend, "normalizer", normalizers.NFC()),
    "pre-tokenizer": lambda backend: setattr(
        backend, "pre_tokenizer", pre_tokenizers.ByteLevel(add_prefix_space=True)
    ),
    "added token": lambda backend: backend.add_tokens(["king"]),
    "added special token": lambda backend: backend.add_special_tokens(["king"]),
}


def test_every_change_of_ids_changes_the_fingerprint():
    def same(backend: Tokenizer) -> None:
        pass

    prints = [changed(same), changed(same, eos="a"), *map(changed, CHANGES.values())]
    assert changed(same) == prints[0]
    assert len(set(prints)) == len(prints) == 7
