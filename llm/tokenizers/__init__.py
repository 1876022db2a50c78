"""Tokenizers: loaded by name, folder or files, and trained."""
