"""From texts to token ids, by the fastest encoder that gives the ids of the reference.

The reference is the tokenizer itself, through the `tokenizers` library. `gigatoken` gives the ids
of most byte-pair tokenizers thirty times as fast. `FastEncoder` does not trust that they are equal
for every tokenizer and text: it compares them on strings on which tokenizers are known to differ,
and on a sample of every batch.
"""

import itertools
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import orjson
from numpy.typing import NDArray

from llm.errors import ConfigError, first_line
from llm.tokenizers.fast import TextTokenizer

_SAMPLE_CHARACTERS = 1024  # compared in each batch; the reference does 2 MB/s
_FEW_TEXTS = 1000
_LONG_TEXT = 2048  # characters, from where on a call for each text costs little
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

_thread_owner = 0  # id of the first process that used threads of the libraries

Ids = NDArray[Any]
Counts = NDArray[np.int64]

log = logging.getLogger("llm.data")


class OtherIds(Exception):
    """The fast encoder gave other ids than the tokenizer itself."""


@dataclass(frozen=True, kw_only=True)
class Encoding:
    """How texts become ids.

    Attributes:
        tokenizer: The tokenizer.
        end_token: Id that ends each document; None for nothing.
        dtype: Dtype of the ids on the disk, wide enough for all ids of the tokenizer.
        allow_special_tokens: Whether the name of a special token in a text is that token.
        on_error: Whether to stop at records that cannot be used, or to skip them.
    """

    tokenizer: TextTokenizer
    end_token: int | None
    dtype: np.dtype[Any]
    allow_special_tokens: bool = False
    on_error: Literal["stop", "skip"] = "stop"


def end_token(tokenizer: TextTokenizer, append_eos: bool) -> int | None:
    """Return the token that ends each document, or None without `append_eos`.

    Raises:
        ConfigError: The tokenizer has no such token.
    """
    if append_eos and tokenizer.eos_token_id is None:
        raise ConfigError(
            "The tokenizer has no end-of-text token to put between documents; pass "
            "--no_append_eos, or use a tokenizer that has one."
        )
    return tokenizer.eos_token_id if append_eos else None


class ReferenceEncoder:
    """The tokenizer itself.

    Args:
        encoding: How texts become ids.
        one_document: Whether no end token follows a text.
        threads: Threads that it may use.

    Raises:
        ConfigError: A slow tokenizer with `allow_special_tokens`.
    """

    def __init__(self, encoding: Encoding, *, one_document: bool, threads: int) -> None:
        end = encoding.end_token
        self.dtype = encoding.dtype
        self.end = np.array([] if end is None or one_document else [end], self.dtype)
        self.allow_special_tokens = encoding.allow_special_tokens
        self._backend: Any = encoding.tokenizer.backend
        self._encode_slow = encoding.tokenizer.encode_slow
        if self._backend is None:
            if self.allow_special_tokens:
                raise ConfigError(
                    "--allow_special_tokens needs a fast tokenizer, and this one is in Python; "
                    "leave it out, or name another tokenizer."
                )
            log.warning(
                "the tokenizer is a slow one, in Python: it runs on one core of each worker, at "
                "about a hundredth of the speed"
            )
            return
        # In the library's words, to encode special tokens is to encode their names as text.
        self._backend.encode_special_tokens = not self.allow_special_tokens
        # The Rust libraries read both when they start their threads.
        os.environ["RAYON_NUM_THREADS"] = str(threads)
        os.environ["TOKENIZERS_PARALLELISM"] = "true" if threads > 1 else "false"

    def encode(self, texts: Sequence[str]) -> tuple[Ids, Counts]:
        """Encode a batch.

        Args:
            texts: UTF-8 text without lone surrogates; of any length.

        Returns:
            The ids of all texts, one after the other [num_tokens], and how many belong to each
            text [len(texts)]. The end token, if there is one, follows each text that has any.
        """
        if self._backend is None:
            assert self._encode_slow is not None  # a tokenizer has one of the two
            lists = [self._encode_slow(text) for text in texts]
        elif len(texts) == 1:  # without any thread, so that this process can still fork
            lists = [self._backend.encode(texts[0], add_special_tokens=False).ids]
        else:
            if not _may_use_threads():
                os.environ["TOKENIZERS_PARALLELISM"] = "false"
            encodings = self._backend.encode_batch_fast(list(texts), add_special_tokens=False)
            lists = [encoding.ids for encoding in encodings]
        counts = np.fromiter(map(len, lists), np.int64, len(lists))
        flat = itertools.chain.from_iterable(lists)
        return _with_ends(np.fromiter(flat, self.dtype, int(counts.sum())), counts, self.end)

    def special_tokens(self) -> list[str]:
        """Return the names of tokens that are no text."""
        added = self._backend.get_added_tokens_decoder()
        return [token.content for token in added.values()]


class FastEncoder:
    """gigatoken, whose ids are compared with the reference.

    Args:
        reference: The tokenizer itself.
        tokenizer_json: The same tokenizer as the text of a tokenizer.json.
        threads: Threads that it may use.

    Raises:
        ImportError: gigatoken is not installed.
        OtherIds: It cannot read this tokenizer, or gives other ids.
    """

    def __init__(self, reference: ReferenceEncoder, tokenizer_json: str, *, threads: int) -> None:
        try:
            import gigatoken
        except ImportError as error:
            raise ImportError("gigatoken is not installed (pip install gigatoken)") from error
        description = orjson.loads(tokenizer_json)
        description["post_processor"] = None
        if not reference.allow_special_tokens:
            # It encodes the name of a token that it does not know as text.
            added = description["added_tokens"]
            description["added_tokens"] = [token for token in added if not token["special"]]
        self._reference = reference
        self._dtype, self._end = reference.dtype, reference.end
        self._threads = threads
        try:
            self._fast: Any = gigatoken.Tokenizer.from_json(orjson.dumps(description)).backend
        except BaseException as error:
            raise _refusal(error, "gigatoken cannot read this tokenizer") from error
        names = reference.special_tokens()
        self._compare([*_PROBES, " ".join(names), *(f"a{name} b{name}" for name in names[:16])])

    def encode(self, texts: Sequence[str]) -> tuple[Ids, Counts]:
        """Encode a batch, as `ReferenceEncoder.encode` does.

        Raises:
            OtherIds: gigatoken fails on this text, or gives other ids than the tokenizer.
        """
        try:
            ids, counts = self._encode(texts)
        except BaseException as error:
            raise _refusal(error, "gigatoken failed") from error
        self._compare_sample(texts, ids, counts)
        return ids, counts

    def _encode(self, texts: Sequence[str]) -> tuple[Ids, Counts]:
        few = len(texts) <= _FEW_TEXTS or sum(map(len, texts)) >= _LONG_TEXT * len(texts)
        # A text at a time needs no thread, and not the import of awkward of half a second.
        if len(texts) == 1 or (few and self._threads == 1):
            arrays = [self._fast.encode(text) for text in texts]
            counts = np.fromiter((array.size for array in arrays), np.int64, len(arrays))
            # One copy that also narrows the dtype: at this speed a second copy would show.
            arrays = [ids for array in arrays if array.size for ids in (array, self._end)]
            ids = np.concatenate([self._end[:0], *arrays], dtype=self._dtype, casting="unsafe")
            return ids, counts + (counts > 0) * self._end.size
        parallel = self._threads > 1 and _may_use_threads()
        batch = self._fast.encode_batch(list(texts), parallel=parallel)
        offsets = np.asarray(batch.layout.offsets.data).astype(np.int64)
        ids = np.asarray(batch.layout.content.data)[offsets[0] : offsets[-1]]
        return _with_ends(ids.astype(self._dtype), np.diff(offsets), self._end)

    def _compare_sample(self, texts: Sequence[str], ids: Ids, counts: Counts) -> None:
        """Compare one text, or a piece of it, chosen by hashing the size of the batch."""
        if not texts:
            return
        number = int(ids.size) * 7919 % len(texts)
        text = texts[number]
        if len(text) > _SAMPLE_CHARACTERS:
            start = int(ids.size) * 104729 % (len(text) - _SAMPLE_CHARACTERS)
            self._compare([text[start : start + _SAMPLE_CHARACTERS]])
            return
        end = int(counts[: number + 1].sum())
        sample = ids[end - int(counts[number]) : end]
        if not np.array_equal(sample, self._reference.encode([text])[0]):
            raise OtherIds(f"gigatoken gives other ids than the tokenizer for {text[:40]!r}")

    def _compare(self, texts: Sequence[str]) -> None:
        for text in texts:
            try:
                ids = self._encode([text])[0]
            except BaseException as error:
                raise _refusal(error, "gigatoken failed") from error
            if not np.array_equal(ids, self._reference.encode([text])[0]):
                raise OtherIds(f"gigatoken gives other ids than the tokenizer for {text[:40]!r}")


Encoder = ReferenceEncoder | FastEncoder


def make_encoder(
    encoding: Encoding, *, one_document: bool = False, threads: int = 1, fast: bool = True
) -> Encoder:
    """Return the fastest encoder that can be trusted with a tokenizer.

    Args:
        encoding: How texts become ids.
        one_document: Whether the texts are pieces of one document, so that no end token follows
            them. Otherwise the end token follows each text.
        threads: Threads that it may use.
        fast: Whether to try gigatoken.
    """
    reference = ReferenceEncoder(encoding, one_document=one_document, threads=threads)
    if not fast or encoding.tokenizer.backend is None:
        return reference
    try:
        return FastEncoder(reference, encoding.tokenizer.backend.to_str(), threads=threads)
    except (ImportError, OtherIds) as error:
        log.info(f"{error}; encoding with the tokenizers library, which is slower")
        return reference


def _may_use_threads() -> bool:
    """Return whether no process from which this one was forked has used the libraries' threads.

    Using threads after a fork deadlocks: the copy of the thread pool has no threads.
    """
    global _thread_owner
    _thread_owner = _thread_owner or os.getpid()
    return _thread_owner == os.getpid()


def _with_ends(ids: Ids, counts: Counts, end: Ids) -> tuple[Ids, Counts]:
    if not end.size:
        return ids, counts
    filled = counts > 0
    return np.insert(ids, np.cumsum(counts)[filled], end[0]), counts + filled


def _refusal(error: BaseException, what: str) -> BaseException:
    """Return what to raise for an error of the library, whose panics are no `Exception`."""
    if isinstance(error, KeyboardInterrupt | SystemExit | MemoryError):
        return error
    return OtherIds(f"{what} ({first_line(error)[:120]})")
