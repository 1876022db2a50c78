"""Text to tokenizers and token files, ahead of training or in the cache of a run."""
