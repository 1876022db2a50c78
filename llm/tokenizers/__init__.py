"""Tokenizers by name, folder or files, and their training."""
