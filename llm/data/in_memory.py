"""Keep the tokens of a stream in main memory.

All processes of a node map the same file and so share the same pages: one of them reads and pins
the pages, for all.
"""

import ctypes
import logging
import os

from llm.data.corpus import Corpus, TokenStream
from llm.data.formats.megatron import beside

_CHUNK_BYTES = 32 * 2**20

log = logging.getLogger("llm.data")


def hold_corpus_in_memory(corpus: Corpus, *, training: bool) -> None:
    """Keep what a run reads of its token files in main memory; one process of a node calls it.

    Args:
        corpus: The splits of the run.
        training: Whether the training split is read, and not the validation split alone.
    """
    for source in (*(corpus.train if training else ()), *corpus.validation):
        if source.weight > 0:
            hold_in_memory(source.stream)


def hold_in_memory(stream: TokenStream) -> bool:
    """Read a stream's bytes once, from first to last, and pins their pages if that is allowed.

    The pin ends with the process.

    Returns:
        Whether the pages are pinned; if not, the system may give up those that it needs elsewhere.
    """
    num_bytes = stream.tokens.nbytes
    _read(stream, num_bytes)
    fault = _pin(stream.tokens.ctypes.data, num_bytes)
    what = f"in memory: {num_bytes / 1e9:.3g} GB of {stream.prefix}.bin"
    if fault is None:
        log.info(f"{what}, pinned")
    else:
        log.info(f"{what}, read ahead but not pinned ({fault}; see `ulimit -l`)")
    return fault is None


def _read(stream: TokenStream, num_bytes: int) -> None:
    """Bring the bytes into the page cache; a file read is larger and faster than page faults."""
    buffer = bytearray(min(_CHUNK_BYTES, num_bytes))
    with open(beside(stream.prefix, ".bin"), "rb", buffering=0) as file:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), stream.first_byte, num_bytes, os.POSIX_FADV_SEQUENTIAL)
        file.seek(stream.first_byte)
        left = num_bytes
        while left > 0:
            read = file.readinto(memoryview(buffer)[: min(len(buffer), left)])
            if not read:
                break  # cut short since it was mapped; the next access to the map raises
            left -= read


def _pin(address: int, num_bytes: int) -> str | None:
    """Lock mapped pages; return the reason where that fails."""
    if num_bytes == 0:
        return None
    try:
        lock = ctypes.CDLL(None, use_errno=True).mlock
    except (OSError, AttributeError, TypeError):  # a system without it
        return "this system has no mlock"
    lock.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    lock.restype = ctypes.c_int
    if lock(address, num_bytes) != 0:
        return os.strerror(ctypes.get_errno())
    return None
