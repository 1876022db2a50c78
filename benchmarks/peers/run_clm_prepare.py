"""Prepare a corpus as Hugging Face's run_clm example does: map, then group into blocks.

It ends where the example would start to train, with both maps done and cached.
"""

import argparse
from itertools import chain

import datasets
from transformers import AutoTokenizer


def main() -> None:
    """Tokenises in batches of a thousand rows, then cuts each thousand into blocks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--input", required=True)
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--block_size", type=int, default=1024)
    parser.add_argument("--preprocessing_num_workers", type=int)
    args = parser.parse_args()
    corpus = datasets.load_dataset("json", data_files={"train": args.input})
    tokenizer = AutoTokenizer.from_pretrained(args.tokenizer)
    size = args.block_size

    def tokenize(rows: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        return tokenizer(rows["text"])

    def group(rows: dict[str, list[list[int]]]) -> dict[str, list[list[int]]]:
        joined = {name: list(chain.from_iterable(lists)) for name, lists in rows.items()}
        stop = len(joined["input_ids"]) // size * size  # the rest of each thousand is dropped
        blocks = {
            name: [ids[first : first + size] for first in range(0, stop, size)]
            for name, ids in joined.items()
        }
        blocks["labels"] = [list(block) for block in blocks["input_ids"]]
        return blocks

    workers = args.preprocessing_num_workers
    tokens = corpus.map(tokenize, batched=True, num_proc=workers, remove_columns=["text"])
    tokens.map(group, batched=True, num_proc=workers)


if __name__ == "__main__":
    main()
