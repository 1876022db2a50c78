"""Print the rate of single-precision matrix products on this machine, the limit of training."""

import json
import time

import torch


def main() -> None:
    """Multiply matrices for two seconds; print the rate of the fastest product."""
    one = torch.rand(2048, 2048)
    product = one @ one
    best, began = float("inf"), time.perf_counter()
    while time.perf_counter() - began < 2:
        start = time.perf_counter()
        torch.mm(one, one, out=product)
        best = min(best, time.perf_counter() - start)
    print(json.dumps({"gflops": 2 * 2048**3 / best / 1e9}))


if __name__ == "__main__":
    main()
