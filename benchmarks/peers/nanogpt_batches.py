"""Draw batches as nanoGPT's train.py does: random positions of a memory map, stacked."""

import argparse
import json
import time

import numpy as np
import torch


def main() -> None:
    """Draw batches and print their times, without imports."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prefix", required=True)
    parser.add_argument("--batches", type=int, required=True)
    parser.add_argument("--batch_size", type=int, default=32)
    parser.add_argument("--block_size", type=int, default=1024)
    args = parser.parse_args()
    size = args.block_size

    def draw() -> tuple[torch.Tensor, torch.Tensor]:
        # The map is made anew for each batch, as there, against the memory that an old one holds.
        tokens = np.memmap(f"{args.prefix}.bin", dtype=np.uint16, mode="r")
        places = torch.randint(len(tokens) - size, (args.batch_size,))
        inputs = [torch.from_numpy(tokens[i : i + size].astype(np.int64)) for i in places]
        labels = [torch.from_numpy(tokens[i + 1 : i + 1 + size].astype(np.int64)) for i in places]
        return torch.stack(inputs), torch.stack(labels)

    cpu, wall = time.process_time(), time.perf_counter()
    for _ in range(args.batches):
        draw()
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    num_tokens = args.batches * args.batch_size * size
    print(json.dumps({"cpu_seconds": cpu, "wall_seconds": wall, "tokens": num_tokens}))


if __name__ == "__main__":
    main()
