"""Whether two token files hold the same documents, in any order; prints one JSON line."""

import argparse
import json
from collections import Counter
from hashlib import blake2b
from pathlib import Path

import numpy as np


def documents(path: Path, end_of_text: int) -> Counter[bytes]:
    """The hashes of all documents of a flat uint16 file, each of which ends with one token."""
    tokens = np.memmap(path, dtype="<u2", mode="r")
    ends = np.flatnonzero(tokens == end_of_text) + 1
    starts = np.concatenate([[0], ends[:-1]])
    return Counter(
        blake2b(tokens[start:end].tobytes(), digest_size=16).digest()
        for start, end in zip(starts, ends, strict=True)
    )


def main() -> None:
    """Compares one file with the sum of others."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ours", type=Path, required=True)
    parser.add_argument("--theirs", type=Path, nargs="+", required=True)
    parser.add_argument("--end_of_text", type=int, required=True)
    args = parser.parse_args()
    ours = documents(args.ours, args.end_of_text)
    theirs: Counter[bytes] = Counter()
    for path in args.theirs:
        theirs += documents(path, args.end_of_text)
    print(json.dumps({"same": ours == theirs, "documents": ours.total()}))


if __name__ == "__main__":
    main()
