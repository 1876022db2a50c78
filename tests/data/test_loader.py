import threading

import numpy as np
import pytest
import torch

from llm.data.batch_plan import BatchPlan
from llm.data.corpus import CorpusSource, Samples, TokenStream
from llm.data.formats.megatron import TokenFile
from llm.data.loader import EvalLoader, TrainLoader
from llm.data.order import DocumentBoundaries, WindowSampler
from llm.errors import DataError
from tests.support.token_files import TokenFileWriter

CPU = torch.device("cpu")
BLOCK_SIZE = 4


class RecordingStream(TokenStream):
    """Remembers the positions that were read."""

    def read_windows(self, starts, length):
        self.read = [*getattr(self, "read", []), *starts.tolist()]
        return super().read_windows(starts, length)


@pytest.fixture
def stream(tmp_path):
    return make_stream(tmp_path, 42)


def make_stream(folder, num_tokens):
    # Token t is the number t, so that a label tells where it was read.
    with TokenFileWriter(folder / "text", np.dtype("<u2")) as writer:
        writer.add(np.arange(num_tokens), ends_document=True)
    return RecordingStream(TokenFile(folder / "text"))


def train_loader(
    stream, *, rank=0, world_size=1, micro_batch_size=2, samples=21, document_boundaries=None
):
    by_number = Samples([CorpusSource("text", 1.0, stream)], block_size=BLOCK_SIZE, seed=1)
    plan = BatchPlan(
        num_windows=by_number.num_windows,
        micro_batch_size=micro_batch_size,
        world_size=world_size,
        global_batch_size=8,
        total_samples=samples,
    )
    return TrainLoader(
        samples=by_number,
        batch_plan=plan,
        rank=rank,
        device=CPU,
        document_boundaries=document_boundaries,
    )


def eval_loader(stream, **changes):
    settings = {
        "block_size": BLOCK_SIZE,
        "micro_batch_size": 2,
        "rank": 0,
        "world_size": 1,
        "device": CPU,
        "max_batches": None,
    }
    return EvalLoader(stream=stream, **{**settings, **changes})


def inputs_that_count(batches):
    """The inputs of all micro-batches, in order, without those that fill up."""
    rows = [
        inputs[labels[:, 0] != -100]
        for batch in batches
        for inputs, labels, *_ in batch.micro_batches
    ]
    return torch.cat(rows)


def loader_threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("train-loader")]


def test_labels_are_the_tokens_that_follow(stream):
    batch = next(train_loader(stream).read_steps(0))

    assert len(batch.micro_batches) == 4
    for inputs, labels, *_ in batch.micro_batches:
        assert inputs.dtype == labels.dtype == torch.int64
        assert inputs.shape == labels.shape == (2, BLOCK_SIZE)
        assert inputs.is_contiguous()
        assert labels.is_contiguous()
        assert torch.equal(labels, (inputs + 1) % 42)


def test_samples_are_in_the_order_of_the_sampler(stream):
    loader = train_loader(stream)
    sampler = WindowSampler(num_tokens=42, block_size=BLOCK_SIZE, seed=1)

    batches = list(loader.read_steps(0))

    assert len(batches) == 3
    assert (
        inputs_that_count(batches)[:, 0].tolist() == sampler.locate_windows(np.arange(21)).tolist()
    )
    assert np.concatenate([batch.samples for batch in batches]).tolist() == list(range(21))


def test_the_smaller_last_step_is_filled_with_ignored_labels(stream):
    *_, last = train_loader(stream).read_steps(0)

    assert last.num_samples == 5
    assert last.num_tokens == 5 * BLOCK_SIZE
    assert [micro.labels.shape for micro in last.micro_batches] == [(2, BLOCK_SIZE)] * 4
    counted = sum(int((labels != -100).sum()) for _, labels, *_ in last.micro_batches)
    assert counted == last.num_tokens
    assert all(int(inputs.min()) >= 0 for inputs, *_ in last.micro_batches)


@pytest.mark.parametrize(("world_size", "micro_batch_size"), [(1, 8), (2, 1), (2, 4), (4, 2)])
def test_sample_order_does_not_depend_on_world_size_or_accumulation(
    stream, world_size, micro_batch_size
):
    expected = list(train_loader(stream).read_steps(0))
    by_rank = [
        list(
            train_loader(
                stream, rank=rank, world_size=world_size, micro_batch_size=micro_batch_size
            ).read_steps(0)
        )
        for rank in range(world_size)
    ]

    for step, batch in enumerate(expected):
        together = [
            pair
            for pairs in zip(*(batches[step].micro_batches for batches in by_rank), strict=True)
            for pair in pairs
        ]
        for field in ("input_ids", "labels"):
            expected_rows = torch.cat([getattr(micro, field) for micro in batch.micro_batches])
            assert torch.equal(torch.cat([getattr(m, field) for m in together]), expected_rows)
        assert {batches[step].num_tokens for batches in by_rank} == {batch.num_tokens}


def test_resuming_reads_no_skipped_data(stream):
    whole = list(train_loader(stream).read_steps(0))
    stream.read = []

    rest = list(train_loader(stream).read_steps(2))

    assert len(rest) == 1
    assert torch.equal(inputs_that_count(rest), inputs_that_count(whole[2:]))
    sampler = WindowSampler(num_tokens=42, block_size=BLOCK_SIZE, seed=1)
    assert set(stream.read) == set(sampler.locate_windows(np.arange(16, 21)).tolist())
    assert list(train_loader(stream).read_steps(3)) == []


def test_an_error_in_the_loader_thread_is_raised_by_the_iterator(stream):
    class Broken(RecordingStream):
        def read_windows(self, starts, length):
            if len(getattr(self, "read", [])) >= 8:
                raise DataError("the disk is gone")
            return super().read_windows(starts, length)

    stream.__class__ = Broken
    steps = train_loader(stream).read_steps(0)

    next(steps)
    with pytest.raises(DataError, match="the disk is gone"):
        next(steps)
    assert loader_threads() == []


def test_closing_early_stops_the_thread_and_little_is_prefetched(stream):
    steps = train_loader(stream, samples=8000).read_steps(0)

    next(steps)
    assert len(loader_threads()) == 1
    steps.close()

    assert loader_threads() == []
    assert len(stream.read) <= 4 * 8


@pytest.mark.parametrize("num_tokens", [2, 5, 6, 41, 42])
@pytest.mark.parametrize(("world_size", "micro_batch_size"), [(1, 1), (1, 5), (2, 2), (3, 1)])
def test_evaluation_predicts_each_token_but_the_first_once(
    tmp_path, num_tokens, world_size, micro_batch_size
):
    stream = make_stream(tmp_path, num_tokens)
    loaders = [
        eval_loader(stream, rank=rank, world_size=world_size, micro_batch_size=micro_batch_size)
        for rank in range(world_size)
    ]

    pairs = [pair for loader in loaders for pair in loader]
    again = [pair for loader in loaders for pair in loader]

    assert all(torch.equal(one.labels, two.labels) for one, two in zip(pairs, again, strict=True))
    labels = torch.cat([micro.labels.reshape(-1) for micro in pairs])
    inputs = torch.cat([micro.input_ids.reshape(-1) for micro in pairs])
    counts = labels != -100
    assert sorted(labels[counts].tolist()) == list(range(1, num_tokens))
    assert torch.equal(labels[counts], inputs[counts] + 1)
    assert {len(loader) for loader in loaders} == {len(pairs) // world_size}
    assert {loader.num_tokens for loader in loaders} == {num_tokens - 1}
    assert {tuple(micro.input_ids.shape) for micro in pairs} == {(micro_batch_size, BLOCK_SIZE)}


@pytest.mark.parametrize(("world_size", "batches"), [(1, 3), (2, 2), (3, 1)])
def test_evaluation_may_stop_after_some_batches(stream, world_size, batches):
    loaders = [
        eval_loader(stream, max_batches=3, rank=rank, world_size=world_size)
        for rank in range(world_size)
    ]

    labels = torch.cat([micro.labels.reshape(-1) for loader in loaders for micro in loader])

    assert {len(loader) for loader in loaders} == {batches}
    assert sorted(labels[labels != -100].tolist()) == list(range(1, 25))
    assert {loader.num_tokens for loader in loaders} == {24}
    assert len(eval_loader(stream, max_batches=100)) == 6
    assert eval_loader(stream, max_batches=100).num_tokens == 41


def test_a_validation_text_of_one_token_is_refused(tmp_path):
    with pytest.raises(DataError, match="validation text has 1 token"):
        eval_loader(make_stream(tmp_path, 1))


def test_by_default_a_batch_has_neither_positions_nor_document_numbers(stream):
    micro = next(train_loader(stream).read_steps(0)).micro_batches[0]
    evaluated = next(iter(eval_loader(stream)))

    assert micro.positions is micro.documents is None
    assert evaluated.positions is evaluated.documents is None


def test_training_and_evaluation_batches_number_the_documents_of_a_window(stream):
    """Token 9 ends a document: the window 8 9 10 11 begins another one with its third token."""
    document_boundaries = DocumentBoundaries(9, positions=True, attention=True)

    trained = [
        m
        for batch in train_loader(stream, document_boundaries=document_boundaries).read_steps(0)
        for m in batch.micro_batches
    ]
    evaluated = list(eval_loader(stream, document_boundaries=document_boundaries))

    for micro_batches in (trained, evaluated):
        found = {
            tuple(row): (positions, documents)
            for micro in micro_batches
            for row, positions, documents in zip(
                *(part.tolist() for part in (micro.input_ids, micro.positions, micro.documents)),
                strict=True,
            )
        }
        assert found[8, 9, 10, 11] == ([0, 1, 0, 1], [0, 0, 1, 1])
        assert found[12, 13, 14, 15] == ([0, 1, 2, 3], [0, 0, 0, 0])
