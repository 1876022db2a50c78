"""Turn texts into token ids with the fastest encoder that agrees with the reference.

The reference is the tokenizer itself, through the `tokenizers` library. For most byte-pair
tokenizers, `gigatoken` gives the same ids thirty times as fast. `FastEncoder` does not rely on
this: it compares the ids of strings that are known to differ between tokenizers, and of a sample of
every batch.
"""

import itertools
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any, Literal, ParamSpec, TypeVar

import numpy as np
import orjson
from numpy.typing import NDArray

from llm.errors import ConfigError, DataError, one_line
from llm.prepare.text_tokenizer import TextTokenizer

_SAMPLE_CHARACTERS = 1024  # compared in each batch; the reference does 2 MB/s
_SMALL_BATCH_TEXTS = 1000
_LONG_TEXT_CHARACTERS = 2048  # characters; for longer texts, one call per text costs little
_PROBES = (
    "",
    " ",
    "\n",
    "a",
    " a  b   c    d\t\te\n\n\nf\r\n\r\ng \n h\u00a0i\u3000j\u2003 ",
    "I'm you're he'll she'd we've it's I'M YOU'RE HE'LL 'tis rock'n'roll ''s",
    "0 1 12 123 1234 12345678901234567890 1,234.56 0x1F 3.14e-10 v1.2.3 ½ ² ٣٤ १२",
    "naïve café cafe\u0301 Zürich ﬁne Ǆ İstanbul ß ſ Ω Å ｆｕｌｌ ｗｉｄｔｈ ①",  # noqa: RUF001
    "你好，世界。今天天气很好 これはテストです 한국어 문장 ภาษาไทย עברית العربية हिन्दी",  # noqa: RUF001
    "🙂👍🏽👩‍👩‍👧‍👦🇩🇪 \U0001f9d1\u200d\U0001f680 \ufeff\u200b\u00ad\u2028\u2029\ufffd",
    "def f(x):\n    return {'a': [x**2 for _ in range(10)]}  # ok?!\n\n\tif (a<b)&&c!=d;",
    "https://example.org/a_b-c?d=e&f=%20#g user@host.tld C:\\dir\\file ~/.x __init__ ===---===",
    "\x00\x01\x1b[0m\x7f\x80\x9f\xa0 <s> </s> <unk> <pad> [CLS] [SEP] <|x|> ▁ Ġ ##",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa" * 4,
    "  leading and trailing  ",
)

_thread_process_id = 0  # id of the first process that used threads of the libraries

P = ParamSpec("P")
T = TypeVar("T")
Ids = NDArray[Any]
Counts = NDArray[np.int64]

logger = logging.getLogger("llm.data")


class WrongIdsError(Exception):
    """The fast encoder gives other ids than the tokenizer itself."""


@dataclass(frozen=True, kw_only=True)
class Encoding:
    """How texts become ids.

    Attributes:
        tokenizer: The tokenizer.
        end_token: Id that ends each document; None adds no token.
        begin_token: Id that begins each document; None adds no token.
        dtype: Dtype of the ids on the disk, wide enough for all ids of the tokenizer.
        allow_special_tokens: Whether the name of a special token in a text becomes that token.
        on_error: Whether to stop at records that cannot be used, or to skip them.
    """

    tokenizer: TextTokenizer
    end_token: int | None
    dtype: np.dtype[Any]
    begin_token: int | None = None
    allow_special_tokens: bool = False
    on_error: Literal["stop", "skip"] = "stop"

    @property
    def end(self) -> Ids:
        """The end token as ids: one or none."""
        return np.array([] if self.end_token is None else [self.end_token], self.dtype)

    @property
    def begin(self) -> Ids:
        """The begin token as ids: one or none."""
        return np.array([] if self.begin_token is None else [self.begin_token], self.dtype)


def _translate_errors(
    function: Callable[P, T], make_error: Callable[[str], Exception]
) -> Callable[P, T]:
    """Turn errors of a library, also panics of Rust, into the error that `make_error` returns."""

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            with _hide_panics():
                return function(*args, **kwargs)
        except (KeyboardInterrupt, SystemExit, MemoryError):
            raise
        except BaseException as error:
            reason = one_line(error)[:120]
        # With Dask, an error is pickled together with its cause, and a panic cannot be pickled.
        raise make_error(reason)

    return call


@contextmanager
def _hide_panics() -> Iterator[None]:
    """Discard what Rust writes to stderr before it raises a panic."""
    if threading.current_thread() is not threading.main_thread():  # other threads of Dask log
        yield
        return
    sys.stderr.flush()
    stderr = os.dup(2)
    try:
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), 2)
        yield
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)


class ReferenceEncoder:
    """The tokenizer itself.

    Raises:
        ConfigError: A slow tokenizer with `allow_special_tokens`.
    """

    def __init__(self, encoding: Encoding, *, num_threads: int) -> None:
        self._name = encoding.tokenizer.name
        self._dtype, self._begin, self._end = encoding.dtype, encoding.begin, encoding.end
        self._backend: Any = encoding.tokenizer.backend
        self._encode_slow = encoding.tokenizer.encode_slow
        if self._backend is None:
            if encoding.allow_special_tokens:
                raise ConfigError(
                    "--allow_special_tokens needs a fast tokenizer, and this one is in Python; "
                    "leave it out, or name another tokenizer."
                )
            logger.warning(
                "this is a slow tokenizer, in Python: it runs on one core per worker, at about a "
                "hundredth of the speed"
            )
            return
        # In the library's terms, encoding special tokens means encoding their names as text.
        self._backend.encode_special_tokens = not encoding.allow_special_tokens
        # The Rust libraries read both when they start their threads.
        os.environ["RAYON_NUM_THREADS"] = str(num_threads)
        os.environ["TOKENIZERS_PARALLELISM"] = "true" if num_threads > 1 else "false"

    def encode(self, texts: Sequence[str], *, adds_boundaries: bool = True) -> tuple[Ids, Counts]:
        """Encode a batch.

        Args:
            texts: UTF-8 text without lone surrogates; of any length.
            adds_boundaries: Whether the begin token and the end token, if there are any, surround
                each text that has any ids.

        Returns:
            The concatenated ids of all texts [num_tokens], and how many belong to each text
            [len(texts)].

        Raises:
            DataError: The tokenizer fails on a text.
        """
        try:
            ids_by_text = _translate_errors(self._encode_batch, DataError)(texts)
        except DataError:
            for text in texts:  # which one is it?
                make_error = partial(self._refusal_error, text)
                _translate_errors(self._encode_batch, make_error)([text])
            raise
        counts = np.fromiter(map(len, ids_by_text), np.int64, len(ids_by_text))
        flat_ids = itertools.chain.from_iterable(ids_by_text)
        ids = np.fromiter(flat_ids, self._dtype, int(counts.sum()))
        if not adds_boundaries:
            return ids, counts
        return _insert_boundary_tokens(ids, counts, self._begin, self._end)

    def _encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        if self._backend is None:
            assert self._encode_slow is not None  # a tokenizer has one of the two
            return [self._encode_slow(text) for text in texts]
        if len(texts) == 1:  # without threads, so that this process can still fork
            return [self._backend.encode(texts[0], add_special_tokens=False).ids]
        if not _may_use_threads():
            os.environ["TOKENIZERS_PARALLELISM"] = "false"
        encodings = self._backend.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def _refusal_error(self, text: str, reason: str) -> DataError:
        return DataError(
            f"The tokenizer {self._name} cannot encode the text that begins with {text[:60]!r}: "
            f"{reason}. Remove this text, or use another tokenizer."
        )


class FastEncoder:
    """gigatoken; its ids are compared with the reference.

    Raises:
        ImportError: gigatoken is not installed.
        WrongIdsError: gigatoken cannot read this tokenizer, or gives other ids.
    """

    def __init__(
        self, encoding: Encoding, reference: ReferenceEncoder, *, num_threads: int
    ) -> None:
        try:
            import gigatoken
        except ImportError as error:
            raise ImportError("gigatoken is not installed (pip install gigatoken)") from error
        assert encoding.tokenizer.backend is not None  # as the caller has made sure
        tokenizer_json = orjson.loads(encoding.tokenizer.backend.to_str())
        tokenizer_json["post_processor"] = None
        added_tokens = tokenizer_json["added_tokens"]
        if not encoding.allow_special_tokens:
            # gigatoken encodes the name of a token that it does not know as text.
            tokenizer_json["added_tokens"] = [t for t in added_tokens if not t["special"]]
        self._reference = reference
        self._dtype, self._begin, self._end = encoding.dtype, encoding.begin, encoding.end
        self._threads = num_threads
        from_json = _translate_errors(
            gigatoken.Tokenizer.from_json,
            lambda reason: WrongIdsError(f"gigatoken cannot read this tokenizer ({reason})"),
        )
        self._fast_backend: Any = from_json(orjson.dumps(tokenizer_json)).backend
        self._compare_probes([token["content"] for token in added_tokens])

    def encode(self, texts: Sequence[str], *, adds_boundaries: bool = True) -> tuple[Ids, Counts]:
        """Encode a batch, as `ReferenceEncoder.encode` does, and compare a sample of it.

        Raises:
            WrongIdsError: gigatoken fails on this text, or gives other ids than the tokenizer.
        """
        ids, counts = self._encode_texts(texts, adds_boundaries=adds_boundaries)
        if texts:
            self._compare_sample(texts, ids, counts, adds_boundaries=adds_boundaries)
        return ids, counts

    def _compare_probes(self, token_names: Sequence[str]) -> None:
        """Compare the ids of fixed texts, and of texts with the names of the added tokens."""
        name_probes = [f"a{name} b{name}" for name in token_names[:16]]
        for text in (*_PROBES, " ".join(token_names), *name_probes):
            ids, _ = self._encode_texts([text], adds_boundaries=True)
            self._compare_ids(text, ids, adds_boundaries=True)

    def _compare_sample(
        self, texts: Sequence[str], ids: Ids, counts: Counts, *, adds_boundaries: bool
    ) -> None:
        """Compare one text of a batch, or a piece of a long one, with the tokenizer's ids.

        The sizes of the batch choose the text and the piece, by a product with a prime number.
        """
        text_index = int(ids.size) * 7919 % len(texts)
        text = texts[text_index]
        if len(text) > _SAMPLE_CHARACTERS:
            start = int(ids.size) * 104729 % (len(text) - _SAMPLE_CHARACTERS)
            text = text[start : start + _SAMPLE_CHARACTERS]
            text_ids = self._encode_texts([text], adds_boundaries=adds_boundaries)[0]
        else:
            end = int(counts[: text_index + 1].sum())
            text_ids = ids[end - int(counts[text_index]) : end]
        self._compare_ids(text, text_ids, adds_boundaries=adds_boundaries)

    @partial(
        _translate_errors, make_error=lambda reason: WrongIdsError(f"gigatoken failed ({reason})")
    )
    def _encode_texts(self, texts: Sequence[str], *, adds_boundaries: bool) -> tuple[Ids, Counts]:
        """Encode a batch by gigatoken, as `encode` does, without a comparison."""
        begin, end = (token if adds_boundaries else token[:0] for token in (self._begin, self._end))
        has_long_texts = sum(map(len, texts)) >= _LONG_TEXT_CHARACTERS * len(texts)
        is_small_batch = len(texts) <= _SMALL_BATCH_TEXTS or has_long_texts
        # Encoding one text at a time needs no threads, and saves half a second for importing
        # awkward.
        if len(texts) == 1 or (is_small_batch and self._threads == 1):
            return self._encode_one_by_one(texts, begin, end)
        is_parallel = self._threads > 1 and _may_use_threads()
        batch = self._fast_backend.encode_batch(list(texts), parallel=is_parallel)
        offsets = np.asarray(batch.layout.offsets.data).astype(np.int64)
        ids = np.asarray(batch.layout.content.data)[offsets[0] : offsets[-1]]
        return _insert_boundary_tokens(ids.astype(self._dtype), np.diff(offsets), begin, end)

    def _encode_one_by_one(self, texts: Sequence[str], begin: Ids, end: Ids) -> tuple[Ids, Counts]:
        """Encode texts in this thread, with boundary tokens around those that have ids."""
        ids_by_text = [self._fast_backend.encode(text) for text in texts]
        counts = np.fromiter((ids.size for ids in ids_by_text), np.int64, len(ids_by_text))
        pieces = [end[:0]]  # without any text, the result still has a dtype
        for ids in ids_by_text:
            if ids.size:
                pieces += [begin, ids, end]
        # The only copy also narrows the dtype: at this speed, a second copy would be noticeable.
        flat_ids = np.concatenate(pieces, dtype=self._dtype, casting="unsafe")
        return flat_ids, counts + (counts > 0) * (begin.size + end.size)

    def _compare_ids(self, text: str, ids: Ids, *, adds_boundaries: bool) -> None:
        if not np.array_equal(
            ids, self._reference.encode([text], adds_boundaries=adds_boundaries)[0]
        ):
            raise WrongIdsError(f"gigatoken gives other ids than the tokenizer for {text[:40]!r}")


Encoder = ReferenceEncoder | FastEncoder


def make_encoder(encoding: Encoding, *, num_threads: int = 1, allow_fast: bool = True) -> Encoder:
    """Return the fastest encoder that gives a tokenizer's ids.

    Args:
        encoding: How texts become ids.
        num_threads: Threads that it may use.
        allow_fast: Whether to try gigatoken.
    """
    reference = ReferenceEncoder(encoding, num_threads=num_threads)
    if not allow_fast or encoding.tokenizer.backend is None:
        return reference
    try:
        return FastEncoder(encoding, reference, num_threads=num_threads)
    except (ImportError, WrongIdsError) as error:
        logger.info(f"{error}; encoding with the tokenizers library, which is slower")
        return reference


def _may_use_threads() -> bool:
    """Return whether threads are safe: no parent of this fork has used the libraries' threads.

    Using threads after a fork deadlocks: the copy of the thread pool has no threads.
    """
    global _thread_process_id
    _thread_process_id = _thread_process_id or os.getpid()
    return _thread_process_id == os.getpid()


def _insert_boundary_tokens(ids: Ids, counts: Counts, begin: Ids, end: Ids) -> tuple[Ids, Counts]:
    """Insert the begin token and the end token, if there are any, around texts that have ids."""
    boundary_tokens = np.concatenate([begin, end])
    if not boundary_tokens.size:
        return ids, counts
    has_ids = counts > 0
    text_ends = np.cumsum(counts)[has_ids]
    # The end token of a text comes before the begin token of the next, at the same position.
    text_starts = text_ends - counts[has_ids]
    positions = np.stack([text_starts] * begin.size + [text_ends] * end.size, axis=1)
    ids = np.insert(ids, positions.ravel(), np.tile(boundary_tokens, text_ends.size))
    return ids, counts + has_ids * boundary_tokens.size
