import numpy as np
import pytest

from llm.data.open_corpus import open_corpus
from llm.data.options import DataOptions
from llm.errors import DataError
from llm.tokenizers.load_tokenizer import compute_fingerprint
from tests.support.token_files import describe, random_documents, write_pair
from tests.support.tokenizers import tiny_tokenizer

TOKENIZER = tiny_tokenizer()
FINGERPRINT = compute_fingerprint(TOKENIZER)


def opened(*, document_boundaries=None, vocab_size=300, **options):
    return open_corpus(
        DataOptions(**options),
        tokenizer=TOKENIZER,
        vocab_size=vocab_size,
        document_boundaries=document_boundaries,
        trust_remote_code=False,
    )


@pytest.fixture
def wiki(tmp_path):
    return write_pair(tmp_path / "wiki_text_document", random_documents(100, seed=1))


@pytest.fixture
def code(tmp_path):
    return write_pair(tmp_path / "code_text_document", random_documents(300, seed=2))


def weights(parts):
    return {part.name: part.weight for part in parts}


def test_weights_are_normalised(wiki, code):
    corpus = opened(data_path=(3.0, str(wiki), 1.0, str(code)))

    shares = {"wiki_text_document": 0.75, "code_text_document": 0.25}
    assert weights(corpus.train) == weights(corpus.validation) == shares
    assert [part.stream.num_documents for part in corpus.train] == [97, 291]
    assert [part.stream.num_documents for part in corpus.validation] == [3, 9]


def test_without_weights_sources_are_weighted_by_their_tokens(tmp_path):
    paths = [write_pair(tmp_path / name, [[1] * 10] * n) for name, n in (("a", 10), ("b", 30))]

    assert weights(opened(data_path=paths_as_words(paths), split="1").train) == {
        "a": 0.25,
        "b": 0.75,
    }


def test_a_path_that_is_given_twice_is_named(wiki, code, caplog):
    opened(data_path=(str(wiki), str(code), str(wiki)))

    assert caplog.messages == [f"--data_path names {wiki} 2 times, and each counts as a source"]
    assert caplog.records[0].same_on_all_ranks


def paths_as_words(paths):
    return tuple(map(str, paths))


def test_separate_training_and_validation_files_are_used_in_full(wiki, code):
    describe(code, fingerprint=FINGERPRINT, largest_token=100, text_bytes=12_345)

    corpus = opened(train_data_path=(str(wiki),), valid_data_path=(str(code),))

    assert corpus.train[0].stream.num_documents == 100
    assert corpus.validation[0].stream.num_documents == 300
    assert corpus.train[0].stream.num_bytes is None
    assert corpus.validation[0].stream.num_bytes == 12_345


def test_train_only_has_no_validation(wiki):
    assert opened(data_path=(str(wiki),), split="100,0,0").validation == ()
    assert opened(train_data_path=(str(wiki),)).validation == ()
    assert opened(valid_data_path=(str(wiki),)).train == ()


def test_a_source_of_weight_0_keeps_its_place_and_does_not_validate(wiki, code):
    corpus = opened(data_path=(0.0, str(wiki), 2.0, str(code)))

    assert weights(corpus.train) == {"wiki_text_document": 0.0, "code_text_document": 1.0}
    assert weights(corpus.validation) == {"code_text_document": 1.0}


def test_sources_of_the_same_name_are_labelled_with_their_folders(tmp_path):
    for folder in ("en", "de"):
        (tmp_path / folder).mkdir()
    paths = [write_pair(tmp_path / folder / "text", [[1] * 10]) for folder in ("en", "de")]

    assert list(weights(opened(train_data_path=paths_as_words(paths)).train)) == [
        "en/text",
        "de/text",
    ]
    same = opened(train_data_path=paths_as_words([paths[0], paths[0]])).train
    assert [part.name for part in same] == ["0-text", "1-text"]


def test_ids_beyond_the_vocabulary_are_refused_by_the_sidecar_at_once(wiki):
    describe(wiki, fingerprint=FINGERPRINT, largest_token=100)

    assert opened(data_path=(str(wiki),), vocab_size=101).train
    with pytest.raises(
        DataError, match=r"holds the token id 100, and the vocabulary of .* has 100 "
    ):
        opened(data_path=(str(wiki),), vocab_size=100)


@pytest.mark.parametrize("option", ["data_path", "train_data_path"])
def test_ids_beyond_the_vocabulary_without_a_sidecar_are_refused_when_read(wiki, option):
    stream = opened(**{option: (str(wiki),)}, vocab_size=50).train[0].stream

    with pytest.raises(DataError, match=r"wiki_text_document\.bin holds the token id \d+"):
        stream.read_windows(np.arange(100), 20)


def test_a_file_without_tokens_is_refused(tmp_path):
    prefix = write_pair(tmp_path / "text", [])

    with pytest.raises(DataError, match=r"text\.bin holds no tokens"):
        opened(data_path=(str(prefix),))


def test_the_error_names_the_default_split_if_it_leaves_a_split_empty(tmp_path):
    prefix = write_pair(tmp_path / "text", [[1, 2]] * 10)

    with pytest.raises(
        DataError, match=r"--split 969,30,1 \(the default\) leaves no documents for v"
    ):
        opened(data_path=(str(prefix),))
