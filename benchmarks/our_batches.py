"""Run one task on token files in a separate process, and print its figures as one JSON line.

python -m benchmarks.our_batches {write,gather,load,far,wait,same} --prefix PATH ...
"""

import argparse
import json
import os
import time
from collections import Counter
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from llm.data.batch_plan import BatchPlan
from llm.data.corpus import CorpusSource, Samples, TokenStream
from llm.data.formats.megatron import TokenFile
from tests.support.token_files import TokenFileWriter

if TYPE_CHECKING:
    from llm.data.loader import TrainLoader

# torch is imported by the tasks that need it, so that the others start faster.

_SEED = 1234
_DOCUMENT = 1000  # tokens
_FAR_SEQUENCE = 1_000_000_000  # tokens
_VOCAB_SIZE = 50257  # GPT-2's; ids are checked against it, as in training
_END_OF_TEXT = 50256


def write(args: argparse.Namespace) -> dict[str, float]:
    """Write a uint16 token file of random ids, in documents of a thousand tokens."""
    generator = np.random.default_rng(_SEED)
    with TokenFileWriter(Path(args.prefix), np.dtype("<u2")) as writer:
        for _ in range(0, args.tokens, _DOCUMENT):
            ids = generator.integers(50256, size=_DOCUMENT, dtype=np.uint16)
            writer.add(ids, ends_document=True)
    return {"tokens": TokenFile(Path(args.prefix)).num_tokens}


def gather(args: argparse.Namespace) -> dict[str, float]:
    """Copy samples out of the memory map and turn them into two tensors, without a thread."""
    import torch

    start = time.process_time()
    samples = _samples(args)
    setup = time.process_time() - start
    tokens = 0

    def read() -> None:
        nonlocal tokens
        for step in range(args.batches):
            numbers = np.arange(step * args.batch_size, (step + 1) * args.batch_size)
            windows = torch.from_numpy(samples.read(numbers).astype(np.int64))
            inputs, labels = windows[:, :-1], windows[:, 1:]
            assert inputs.shape == labels.shape
            tokens += inputs.numel()

    return {**_timed(read), "tokens": tokens, "setup_cpu_seconds": setup}


def load(args: argparse.Namespace) -> dict[str, float]:
    """Read batches by the training loader, whose thread reads ahead."""
    import llm.data.loader  # noqa: F401  # imports torch: imports do not count

    start = time.process_time()
    loader = _loader(args)
    setup = time.process_time() - start
    tokens = 0

    def read() -> None:
        nonlocal tokens
        for step in loader.read_steps(0):
            tokens += sum(batch.input_ids.numel() for batch in step.micro_batches)

    return {**_timed(read), "tokens": tokens, "setup_cpu_seconds": setup}


def far(args: argparse.Namespace) -> dict[str, float]:
    """Open a sparse file of 10**12 tokens, and fetch sample 10**9 of it."""
    import numpy.ma  # noqa: F401  # np.unique imports it: imports do not count

    prefix = Path(args.prefix)
    sequences = 1000
    with TokenFileWriter(prefix, np.dtype("<u2")) as writer:
        writer.add(np.zeros(1, dtype="<u2"), ends_document=True)
    _grow(prefix, sequences)
    begin = time.perf_counter()
    samples = _samples(args)
    opened = time.perf_counter()
    window = samples.read(np.array([1_000_000_000]))
    fetched = time.perf_counter()
    assert window.shape == (1, args.block_size + 1)
    return {
        "tokens": TokenFile(prefix).num_tokens,
        "open_ms": 1e3 * (opened - begin),
        "fetch_ms": 1e3 * (fetched - opened),
    }


def wait(args: argparse.Namespace) -> dict[str, float]:
    """Measure how long a loop with steps of a given time waits for data."""
    loader = _loader(args)
    waited, step_started = 0.0, time.perf_counter()
    begin = None
    for _ in loader.read_steps(0):
        now = time.perf_counter()
        if begin is None:
            begin = now  # nothing has been read ahead before the first step
        else:
            waited += now - step_started
        _pass_time(args.step_ms / 1e3, busy=args.busy)
        step_started = time.perf_counter()
    assert begin is not None
    return {"waited_share": waited / (time.perf_counter() - begin), "steps": args.batches}


def same(args: argparse.Namespace) -> dict[str, int]:
    """Compare the documents of a flat file, named with its suffix, with those of other files.

    The order of the documents does not matter.
    """
    ours = _documents(Path(args.prefix))
    theirs = sum(map(_documents, args.theirs), Counter[bytes]())
    return {"same": ours == theirs, "documents": ours.total()}


def _documents(path: Path) -> Counter[bytes]:
    """Count the hashes of the documents of a flat uint16 file, which all end with one token."""
    tokens = np.memmap(path, dtype="<u2", mode="r")
    ends = np.flatnonzero(tokens == _END_OF_TEXT) + 1
    starts = np.concatenate([[0], ends[:-1]])
    return Counter(
        blake2b(tokens[start:end].tobytes(), digest_size=16).digest()
        for start, end in zip(starts, ends, strict=True)
    )


def _pass_time(seconds: float, *, busy: bool) -> None:
    if not busy:
        time.sleep(seconds)
        return
    import torch

    # Matrix products release the GIL, as a training step does.
    matrix = torch.ones(256, 256)
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        torch.mm(matrix, matrix)


def _stream(args: argparse.Namespace) -> TokenStream:
    return TokenStream(TokenFile(Path(args.prefix)), vocab_size=_VOCAB_SIZE)


def _samples(args: argparse.Namespace) -> Samples:
    source = CorpusSource(name="tokens", weight=1.0, stream=_stream(args))
    return Samples([source], block_size=args.block_size, seed=_SEED)


def _loader(args: argparse.Namespace) -> "TrainLoader":
    import torch

    from llm.data.loader import TrainLoader

    samples = _samples(args)
    plan = BatchPlan(
        num_windows=samples.num_windows,
        micro_batch_size=args.batch_size,
        world_size=1,
        global_batch_size=args.batch_size,
        total_samples=args.batches * args.batch_size,
    )
    return TrainLoader(samples=samples, batch_plan=plan, rank=0, device=torch.device("cpu"))


def _timed(work: Callable[[], object]) -> dict[str, float]:
    cpu, wall = time.process_time(), time.perf_counter()
    work()
    return {
        "cpu_seconds": time.process_time() - cpu,
        "wall_seconds": time.perf_counter() - wall,
    }


def _grow(prefix: Path, sequences: int) -> None:
    """Grow a pair of files to sequences of 10**9 tokens each, all of them sparse."""
    size = _FAR_SEQUENCE * 2
    os.truncate(f"{prefix}.bin", sequences * size)
    idx = Path(f"{prefix}.idx")
    header = bytearray(idx.read_bytes()[:34])
    header[18:26] = sequences.to_bytes(8, "little")
    idx.write_bytes(
        bytes(header)
        + np.full(sequences, _FAR_SEQUENCE, dtype="<i4").tobytes()
        + (np.arange(sequences, dtype="<i8") * size).tobytes()
        + np.array([0, sequences], dtype="<i8").tobytes()
    )


def main() -> None:
    """Run a task and print its figures."""
    tasks = {task.__name__: task for task in (write, gather, load, far, wait, same)}
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("task", choices=sorted(tasks))
    parser.add_argument("--prefix", required=True)
    parser.add_argument("--tokens", type=int, default=0)
    parser.add_argument("--batches", type=int, default=0)
    parser.add_argument("--batch_size", type=int, default=32)
    parser.add_argument("--block_size", type=int, default=1024)
    parser.add_argument("--step_ms", type=float, default=50.0)
    parser.add_argument("--busy", action="store_true")
    parser.add_argument("--theirs", type=Path, nargs="+", default=[])
    args = parser.parse_args()
    print(json.dumps(tasks[args.task](args)))


if __name__ == "__main__":
    main()
