"""Tokenizers by name, folder or files, and how they are saved."""
