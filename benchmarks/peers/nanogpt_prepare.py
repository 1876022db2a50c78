"""Prepare a corpus as nanoGPT prepares OpenWebText, from a JSONL file instead of the Hub.

The steps are those of its data/openwebtext/prepare.py: a 0.05 % validation split, `map` with
tiktoken in 8 processes, and 1024 batches of documents copied into a uint16 memory map.
"""

import argparse
from typing import Any

import datasets
import numpy as np
import tiktoken
from tiktoken.registry import ENCODINGS
from tiktoken_ext.openai_public import r50k_pat_str
from tokens_of_gpt2 import bytes_of_tokens

_END_OF_TEXT = "<|endoftext|>"
_SHARDS = 1024


def register_gpt2(vocab_file: str) -> None:
    """Builds tiktoken's encoding from a local vocab.json; known by its usual name from then on."""
    tokens = bytes_of_tokens(vocab_file)
    ENCODINGS["gpt2"] = tiktoken.Encoding(
        "gpt2",
        pat_str=r50k_pat_str,
        mergeable_ranks={text: rank for text, rank in tokens.items() if rank != len(tokens) - 1},
        special_tokens={_END_OF_TEXT: len(tokens) - 1},
    )


def main() -> None:
    """Writes train.bin and val.bin into the working folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--input", required=True)
    parser.add_argument("--vocab_file", required=True)
    parser.add_argument("--num_proc", type=int, default=8)
    args = parser.parse_args()
    register_gpt2(args.vocab_file)
    encoding = tiktoken.get_encoding("gpt2")

    def encode(row: dict[str, str]) -> dict[str, Any]:
        ids = [*encoding.encode_ordinary(row["text"]), encoding.eot_token]
        return {"ids": ids, "length": len(ids)}

    corpus = datasets.load_dataset("json", data_files=args.input, split="train")
    parts = corpus.train_test_split(test_size=0.0005, seed=2357, shuffle=True)
    for split, name in (("train", "train.bin"), ("test", "val.bin")):
        encoded = parts[split].map(encode, remove_columns=["text"], num_proc=args.num_proc)
        total = int(np.sum(encoded["length"], dtype=np.uint64))
        out = np.memmap(name, dtype=np.uint16, mode="w+", shape=(total,))
        shards = min(_SHARDS, len(encoded))
        position = 0
        for index in range(shards):
            shard = encoded.shard(num_shards=shards, index=index, contiguous=True)
            ids = np.concatenate(shard.with_format("numpy")["ids"])
            out[position : position + len(ids)] = ids
            position += len(ids)
        out.flush()


if __name__ == "__main__":
    main()
