"""Write GPT-2's vocab.json and merges.txt as a Hugging Face tokenizer folder."""

import argparse

from transformers import GPT2Tokenizer

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vocab_file", required=True)
    parser.add_argument("--merges_file", required=True)
    parser.add_argument("--output_dir", required=True)
    args = parser.parse_args()
    GPT2Tokenizer(vocab=args.vocab_file, merges=args.merges_file).save_pretrained(args.output_dir)
