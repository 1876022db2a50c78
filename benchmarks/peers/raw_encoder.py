"""Measure the encoder alone: gigatoken, loaded once, on texts in memory."""

import argparse
import json
import time
from pathlib import Path

import gigatoken
import orjson


def main() -> None:
    """Encode one document after the other by its simplest interface."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--input", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, required=True)
    args = parser.parse_args()
    begin = time.process_time()
    with open(args.input, "rb") as lines:
        texts = [orjson.loads(line)["text"] for line in lines]
    parsing = time.process_time() - begin
    cpu, wall = time.process_time(), time.perf_counter()
    description = (args.tokenizer / "tokenizer.json").read_bytes()
    encode = gigatoken.Tokenizer.from_json(description).backend.encode
    num_tokens = 0
    for text in texts:
        num_tokens += len(encode(text))
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    report = {"cpu_seconds": cpu, "wall_seconds": wall, "tokens": num_tokens}
    print(json.dumps({**report, "parse_cpu_seconds": parsing}))


if __name__ == "__main__":
    main()
