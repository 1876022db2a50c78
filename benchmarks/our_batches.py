"""Our side of the measurements of batches, each in a process of its own; prints one JSON line.

python -m benchmarks.our_batches {write,gather,load,far,wait} --prefix PATH ...
"""

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from llm.data.batch_plan import BatchPlan
from llm.data.corpus import CorpusSource, Samples, TokenStream
from llm.data.formats.megatron import TokenFile
from tests.support.token_files import TokenFileWriter

if TYPE_CHECKING:
    from llm.data.loader import TrainLoader

# torch is imported where it is needed: two of the tasks do without, and end the sooner.

_SEED = 1234
_DOCUMENT = 1000  # tokens
_FAR_SEQUENCE = 1_000_000_000  # tokens
_VOCAB_SIZE = 50257  # of GPT-2; ids are checked against it, as in training


def write(args: argparse.Namespace) -> dict[str, float]:
    """A uint16 token file of random ids, in documents of a thousand tokens."""
    generator = np.random.default_rng(_SEED)
    with TokenFileWriter(Path(args.prefix), np.dtype("<u2")) as writer:
        for _ in range(0, args.tokens, _DOCUMENT):
            ids = generator.integers(50256, size=_DOCUMENT, dtype=np.uint16)
            writer.add(ids, ends_document=True)
    return {"tokens": TokenFile(Path(args.prefix)).num_tokens}


def gather(args: argparse.Namespace) -> dict[str, float]:
    """Samples copied out of the memory map and turned into two tensors; no thread, no plan."""
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
    """The training loader as the trainer uses it, its thread that reads ahead included."""
    import llm.data.loader  # noqa: F401  # with torch: imports are not to count

    start = time.process_time()
    loader = _loader(args)
    setup = time.process_time() - start
    tokens = 0

    def read() -> None:
        nonlocal tokens
        for step in loader.steps(0):
            tokens += sum(batch.input_ids.numel() for batch in step.micro_batches)

    return {**_timed(read), "tokens": tokens, "setup_cpu_seconds": setup}


def far(args: argparse.Namespace) -> dict[str, float]:
    """Opens a sparse file of 10**12 tokens, and fetches sample 10**9 of it."""
    import numpy.ma  # noqa: F401  # numpy does so at its first np.unique: imports are not to count

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
    """A training loop that computes nothing but takes its time; how long it waits for data."""
    loader = _loader(args)
    waited, step_started = 0.0, time.perf_counter()
    begin = None
    for _ in loader.steps(0):
        now = time.perf_counter()
        if begin is None:
            begin = now  # the first step has nothing to read ahead of
        else:
            waited += now - step_started
        _pass_time(args.step_ms / 1e3, busy=args.busy)
        step_started = time.perf_counter()
    assert begin is not None
    return {"waited_share": waited / (time.perf_counter() - begin), "steps": args.batches}


def _pass_time(seconds: float, *, busy: bool) -> None:
    if not busy:
        time.sleep(seconds)
        return
    import torch

    # Matrix products let other Python threads run, as a training step does.
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
    return TrainLoader(samples=samples, plan=plan, rank=0, device=torch.device("cpu"))


def _timed(work: Callable[[], object]) -> dict[str, float]:
    cpu, wall = time.process_time(), time.perf_counter()
    work()
    return {
        "cpu_seconds": time.process_time() - cpu,
        "wall_seconds": time.perf_counter() - wall,
    }


def _grow(prefix: Path, sequences: int) -> None:
    """Turns a pair of files into one of so many sequences of 10**9 tokens, all of them holes."""
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
    """Does one of the tasks and prints its figures."""
    tasks = {task.__name__: task for task in (write, gather, load, far, wait)}
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("task", choices=sorted(tasks))
    parser.add_argument("--prefix", required=True)
    parser.add_argument("--tokens", type=int, default=0)
    parser.add_argument("--batches", type=int, default=0)
    parser.add_argument("--batch_size", type=int, default=32)
    parser.add_argument("--block_size", type=int, default=1024)
    parser.add_argument("--step_ms", type=float, default=50.0)
    parser.add_argument("--busy", action="store_true")
    args = parser.parse_args()
    print(json.dumps(tasks[args.task](args)))


if __name__ == "__main__":
    main()
