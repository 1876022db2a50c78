import dataclasses
import logging
import multiprocessing
import sys

import gigatoken
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import ByT5Tokenizer

from llm.errors import ConfigError, DataError
from llm.prepare.encoder import (
    Encoding,
    FastEncoder,
    ReferenceEncoder,
    WrongIdsError,
    make_encoder,
)
from llm.prepare.text_tokenizer import TextTokenizer, wrap_transformers_tokenizer
from tests.support.tokenizers import tiny_tokenizer

FORK = multiprocessing.get_context("fork")
TEXTS = [
    "the quick brown fox jumps over the lazy dog",
    "",
    "  caf\u00e9 \u4f60\u597d \U0001f642\n\n\tI'm you'll 12345 the dog",
    "x",
    "the fox " * 300,
]


def tiny() -> TextTokenizer:
    return wrap_transformers_tokenizer(tiny_tokenizer(), "tiny")


def make(tokenizer=None, **changes):
    how = {name: changes.pop(name) for name in ("num_threads", "allow_fast") if name in changes}
    settings = {"dtype": np.dtype("<u2"), "end_token": 0, **changes}
    return make_encoder(Encoding(tokenizer=tokenizer or tiny(), **settings), **how)


def expected(texts, tokenizer=None, end=(0,)):
    """What the tokenizers library gives for one text after the other."""
    backend = (tokenizer or tiny()).backend
    lists = [backend.encode(text, add_special_tokens=False).ids for text in texts]
    return [[*ids, *end] if ids else [] for ids in lists]


def check(found, lists):
    ids, counts = found
    assert ids.tolist() == [id for ids in lists for id in ids]
    assert counts.tolist() == [len(ids) for ids in lists]


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("end", [(0,), ()])
def test_ids_are_those_of_the_tokenizers_library_plus_an_end_token(fast, threads, end):
    made = make(allow_fast=fast, num_threads=threads, end_token=end[0] if end else None)

    assert isinstance(made, FastEncoder if fast else ReferenceEncoder)
    for texts in ([], [""], TEXTS[:1], TEXTS, [*TEXTS, *["the fox"] * 1000]):
        check(made.encode(texts), expected(texts, end=end))
    assert made.encode(TEXTS)[0].dtype == np.dtype("<u2")


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("end", [(0,), ()])
def test_a_begin_token_precedes_each_text(fast, threads, end):
    made = make(
        allow_fast=fast, num_threads=threads, begin_token=7, end_token=end[0] if end else None
    )

    for texts in ([], [""], TEXTS[:1], TEXTS, [*TEXTS, *["the fox"] * 1000]):
        lists = [[7, *ids] if ids else [] for ids in expected(texts, end=end)]
        check(made.encode(texts), lists)
    check(made.encode(TEXTS, adds_boundaries=False), expected(TEXTS, end=()))


@pytest.mark.parametrize("fast", [True, False])
def test_a_forked_process_encodes_after_its_parent_used_threads(fast):
    """Those of the first do not survive the fork; to wait for them is to wait for ever."""
    texts = TEXTS * (3000 if fast else 300)  # of less, the fast library makes one thread's work
    made = make(allow_fast=fast, num_threads=2)
    first = made.encode(texts)[0]

    def encode_again():
        assert np.array_equal(made.encode(texts)[0], first)

    process = FORK.Process(target=encode_again, daemon=True)

    process.start()
    process.join(30)

    assert process.exitcode == 0


ENCODERS = {}


@settings(max_examples=100, deadline=None)
@given(texts=st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=60), max_size=4))
def test_any_text_has_the_same_ids_by_either_encoder(texts):
    if not ENCODERS:
        ENCODERS.update(fast=make(allow_fast=True), reference=make(allow_fast=False))
    fast, reference = ENCODERS["fast"].encode(texts), ENCODERS["reference"].encode(texts)

    assert fast[0].tolist() == reference[0].tolist()
    assert fast[1].tolist() == reference[1].tolist()


def special(kind, allow):
    if kind == "slow":
        tokenizer = ByT5Tokenizer()
        settings = {"end_token": tokenizer.eos_token_id}
    else:
        tokenizer = tiny_tokenizer()
        settings = {"allow_fast": kind == "fast"}
    made = make(
        wrap_transformers_tokenizer(tokenizer, kind), allow_special_tokens=allow, **settings
    )
    return tokenizer, made


@pytest.mark.parametrize("kind", ["fast", "reference", "slow"])
def test_the_name_of_a_special_token_is_text(kind):
    tokenizer, made = special(kind, allow=False)
    text = f"a{tokenizer.eos_token}{tokenizer.eos_token} b"

    ids = made.encode([text])[0].tolist()

    assert ids[-1] == tokenizer.eos_token_id
    assert tokenizer.eos_token_id not in ids[:-1]
    assert tokenizer.decode(ids[:-1]) == text


@pytest.mark.parametrize("kind", ["fast", "reference"])
def test_the_name_of_a_special_token_is_that_token_where_allowed(kind):
    tokenizer, made = special(kind, allow=True)
    text = f"a{tokenizer.eos_token}{tokenizer.eos_token} b"

    ids = made.encode([text])[0].tolist()

    assert ids.count(tokenizer.eos_token_id) == 3


def test_a_slow_tokenizer_takes_the_names_of_special_tokens_for_text_only():
    with pytest.raises(ConfigError, match="--allow_special_tokens needs a fast tokenizer"):
        special("slow", allow=True)


def tokenizer_of_words() -> TextTokenizer:
    """A kind that gigatoken does not know."""
    backend = Tokenizer(models.WordLevel({"[UNK]": 0, "the": 1, "fox": 2}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return TextTokenizer(
        name="words",
        backend=backend,
        encode_slow=None,
        eos_token_id=None,
        bos_token_id=None,
        size=3,
        fingerprint="words",
    )


def test_a_tokenizer_that_the_fast_library_cannot_read_encodes_slowly(caplog):
    caplog.set_level(logging.INFO, "llm.data")

    made = make(tokenizer_of_words(), end_token=None)

    check(made.encode(["the fox", "the cat"]), [[1, 2], [1, 0]])
    assert "encoding with the tokenizers library, which is slower" in caplog.text


def test_without_the_library_the_slow_path_is_used_and_pip_is_suggested(monkeypatch, caplog):
    caplog.set_level(logging.INFO, "llm.data")
    monkeypatch.setitem(sys.modules, "gigatoken", None)

    check(make().encode(TEXTS), expected(TEXTS))

    assert "gigatoken is not installed (pip install gigatoken); encoding with" in caplog.text


class Panic(BaseException):
    """As Rust's panics arrive in Python."""


def replace_library(monkeypatch, encode):
    """A gigatoken whose encoder gives what `encode` makes of the right ids."""
    real = gigatoken.Tokenizer.from_json

    class Backend:
        def __init__(self, backend):
            self._backend = backend

        def encode(self, text):
            return encode(self._backend.encode(text))

    class Stand:
        def __init__(self, description):
            self.backend = Backend(real(description).backend)

    monkeypatch.setattr(gigatoken.Tokenizer, "from_json", Stand)


def wrong(ids):
    return np.asarray(ids) + (np.asarray(ids).size > 5)


def panics(ids):
    raise Panic("called `Option::unwrap()` on a `None` value\nnote: run with RUST_BACKTRACE=1")


@pytest.mark.parametrize(
    ("encode", "note"),
    [
        (wrong, "gigatoken gives other ids than the tokenizer for"),
        (panics, "on a `None` value note: run with RUST_BACKTRACE=1); encoding with"),
    ],
)
def test_a_library_with_wrong_ids_from_the_start_is_not_used(monkeypatch, caplog, encode, note):
    caplog.set_level(logging.INFO, "llm.data")
    replace_library(monkeypatch, encode)

    check(make().encode(TEXTS), expected(TEXTS))

    assert note in caplog.text
    assert len(caplog.messages) == 1


def test_a_library_that_panics_over_the_tokenizer_is_not_used(monkeypatch, caplog):
    caplog.set_level(logging.INFO, "llm.data")
    monkeypatch.setattr(gigatoken.Tokenizer, "from_json", panics)

    assert isinstance(make(), ReferenceEncoder)
    assert "gigatoken cannot read this tokenizer (called" in caplog.text


@pytest.mark.parametrize(("encode", "note"), [(wrong, "gives other ids"), (panics, "failed")])
def test_a_library_with_wrong_ids_later_on_is_detected(monkeypatch, encode, note):
    broken = []
    replace_library(monkeypatch, lambda ids: encode(ids) if broken else ids)
    made = make()
    made.encode(TEXTS)
    broken.append(True)

    def encode_some_batches():  # each is compared somewhere else
        for number in range(10):
            made.encode([*TEXTS[:number], "the fox " * 20])

    with pytest.raises(WrongIdsError, match=note):
        encode_some_batches()


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_an_interruption_does_not_count_as_a_library_error(monkeypatch, error):
    started = []

    def interrupted(ids):
        if started:
            raise error
        return ids

    replace_library(monkeypatch, interrupted)
    made = make()
    started.append(True)

    with pytest.raises(error):
        made.encode(TEXTS)


def test_the_comparison_reaches_every_text_and_every_place_of_a_long_one(monkeypatch):
    made = make()
    compared = []
    real = made._reference.encode
    monkeypatch.setattr(
        made._reference,
        "encode",
        lambda texts, **how: compared.append(texts) or real(texts, **how),
    )

    for number in range(200):
        made.encode(["the fox"] * (number % 7 + 1) + [f"dog {number}"])
    long = "".join(f"{number:08} " for number in range(2000))
    for number in range(300):
        made.encode([long + "the fox " * number])

    short = [texts[0] for texts in compared[:200]]
    assert "the fox" in short
    assert any(text.startswith("dog") for text in short)
    starts = [int(texts[0].split()[1]) for texts in compared[200:] if "fox" not in texts[0]]
    assert min(starts) < 300
    assert max(starts) > 1500


@pytest.mark.parametrize("texts", [["x" * 40], ["the dog", "x" * 40]])
def test_a_text_on_which_the_tokenizer_panics_is_refused(texts, capfd):
    """Rust raises no `Exception` here, and writes to stderr."""
    tokenizer = tiny()
    assert tokenizer.backend is not None
    tokenizer.backend.pre_tokenizer = pre_tokenizers.Split(Regex("(x+x+)+y"), "isolated")
    refused = r"The tokenizer tiny cannot encode the text that begins with 'xxx.*: Onig.*retry"

    with pytest.raises(DataError, match=refused) as raised:
        make(tokenizer, allow_fast=False).encode(texts)
    # With Dask, errors are pickled together with these, and a panic cannot be pickled.
    errors = [raised.value, raised.value.__cause__, raised.value.__context__]
    assert {type(error) for error in errors} == {DataError, type(None)}
    sys.stderr.write("a later line")
    assert capfd.readouterr().err == "a later line"


def test_a_text_on_which_a_tokenizer_in_python_fails_is_refused():
    def fail(text: str) -> list[int]:
        raise KeyError(text)

    slow = dataclasses.replace(tiny(), backend=None, encode_slow=fail)
    with pytest.raises(DataError, match="cannot encode the text that begins with 'the dog'"):
        make(slow).encode(["the dog"])
