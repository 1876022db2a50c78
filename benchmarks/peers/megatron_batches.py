"""Read batches from Megatron-LM's GPTDataset through torch's DataLoader.

The settings are its cheapest: no attention mask, cached position ids, windows across documents.
"""

import argparse
import json
import resource
import time
from types import SimpleNamespace

import numpy as np
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.utils import Split
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler


def cpu_seconds() -> float:
    """Of this process and of those of its children that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def build(args: argparse.Namespace) -> GPTDataset:
    """Opens the token file and builds its three indices."""
    config = GPTDatasetConfig(
        random_seed=1234,
        sequence_length=args.block_size,
        blend=([args.prefix], None),
        split="100,0,0",
        path_to_cache=args.cache_dir,
        tokenizer=SimpleNamespace(vocab_size=50257, eod=50256, pad=0, unique_identifiers={}),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )
    tokens = IndexedDataset(args.prefix)
    documents = np.arange(len(tokens.document_indices) - 1, dtype=np.int32)
    samples = args.batches * args.batch_size
    return GPTDataset(tokens, args.prefix, documents, samples, Split.train, config)


def main() -> None:
    """Reads batches and prints what they took, and what building the index took; not imports."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prefix", required=True)
    parser.add_argument("--cache_dir", required=True)
    parser.add_argument("--batches", type=int, required=True)
    parser.add_argument("--num_workers", type=int, required=True)
    parser.add_argument("--batch_size", type=int, default=32)
    parser.add_argument("--block_size", type=int, default=1024)
    args = parser.parse_args()
    before = cpu_seconds()
    dataset = build(args)
    setup = cpu_seconds() - before

    cpu, wall = cpu_seconds(), time.perf_counter()
    order = SequentialSampler(range(args.batches * args.batch_size))
    batches = BatchSampler(order, args.batch_size, drop_last=True)
    loader = DataLoader(dataset, batch_sampler=batches, num_workers=args.num_workers)
    num_tokens = sum(batch["tokens"].numel() for batch in loader)
    cpu, wall = cpu_seconds() - cpu, time.perf_counter() - wall
    report = {"cpu_seconds": cpu, "wall_seconds": wall, "tokens": num_tokens}
    print(json.dumps({**report, "setup_cpu_seconds": setup}))


if __name__ == "__main__":
    main()
