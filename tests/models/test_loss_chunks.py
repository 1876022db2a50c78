"""The number of tokens in a chunk of the loss on an accelerator."""

import pytest

from llm.models.loss_chunks import (
    LossChunks,
    choose_equal_chunk_rows,
    choose_fastest_chunk_rows,
    default_chunks,
)

GPT2, LLAMA = 50257, 32000
H100 = 132
"""Multiprocessors of an H100 SXM or H200."""


@pytest.mark.parametrize(
    ("tokens", "columns", "chunk_bytes", "rows"),
    [
        (8192, 50257, 512 * 2**20, 2048),  # 2,668 tokens fit: four equal chunks, not three and 512
        (16384, 50304, 512 * 2**20, 2432),  # seven chunks, the last of 1,792 tokens
        (4096, 128256, 512 * 2**20, 1024),
        (16384, 50304, 2**30, 4096),  # four chunks
        (1024, 50257, 512 * 2**20, 1024),  # one chunk
        (63, 320, 512 * 2**20, 128),
        (8192, 262144, 2**20, 128),  # 128 tokens at least
        (0, 320, 2**20, 128),
    ],
)
def test_chunks_are_equal_and_multiples_of_128(tokens, columns, chunk_bytes, rows):
    assert choose_equal_chunk_rows(tokens, columns, chunk_bytes) == rows


@pytest.mark.parametrize(
    ("tokens", "columns", "width", "multiprocessors", "rows"),
    [
        (65536, GPT2, 768, H100, 11008),  # 258 tiles of the product: two waves, six times
        (65536, GPT2, 1024, H100, 8192),  # 256 tiles: two waves, eight times
        (65536, GPT2, 768, 108, 8704),  # an A100: 204 tiles, two waves
        (16384, LLAMA, 2048, H100, 16384),  # one chunk: 1,024 tiles in eight waves
        (1024, GPT2, 768, H100, 1024),
        (63, 320, 64, H100, 128),
        (0, 320, 64, H100, 128),
        (8192, 2_000_000, 768, H100, 256),  # no more fit
    ],
)
def test_chunks_fill_the_waves_of_the_multiprocessors(
    tokens, columns, width, multiprocessors, rows
):
    chunks = LossChunks(num_bytes=2**30, num_multiprocessors=multiprocessors)
    assert chunks.choose_rows(tokens, columns, width, is_in_place=True) == rows


def test_no_other_size_that_fits_has_fewer_waves_than_gpt2s():
    def waves(rows: int) -> int:
        chunks = [min(rows, 65536 - start) for start in range(0, 65536, rows)]
        tiles = [-(-chunk // 128) * 3 for chunk in chunks]  # 768 columns are three tiles
        return sum(-(-number // H100) for number in tiles)

    sizes = {"num_multiprocessors": H100, "width": 768}
    assert waves(choose_fastest_chunk_rows(65536, GPT2, 2 * 2**30, **sizes)) == 12 == waves(65536)
    assert waves(choose_equal_chunk_rows(65536, GPT2, 2 * 2**30)) == 14


def test_chunks_on_unknown_multiprocessors_are_equal():
    chunks = LossChunks(num_bytes=2**30, num_multiprocessors=None)
    assert chunks.choose_rows(65536, GPT2, 768, is_in_place=True) == choose_equal_chunk_rows(
        65536, GPT2, 2 * 2**30
    )
    assert chunks.choose_rows(65536, GPT2, 768, is_in_place=False) == choose_equal_chunk_rows(
        65536, GPT2, 2**30
    )


@pytest.mark.parametrize(
    ("gibibytes", "mebibytes"),
    [(8, 128), (32, 512), (48, 768), (64, 1024), (80, 1024), (141, 1024), (None, 512)],
)
def test_chunks_take_a_64th_of_the_devices_memory_up_to_1_gib(gibibytes, mebibytes):
    memory = None if gibibytes is None else gibibytes * 2**30
    assert default_chunks(memory, H100) == LossChunks(
        num_bytes=mebibytes * 2**20, num_multiprocessors=H100
    )


def test_the_log_names_the_memory_and_the_multiprocessors():
    chunks = default_chunks(141 * 2**30, H100)
    assert chunks.describe() == (
        "chunks of about 1,024 MiB of float32 logits, for 132 multiprocessors"
    )
    assert default_chunks(None, None).describe() == "chunks of about 512 MiB of float32 logits"
