"""Pretraining of GPT-like language models, exact and fast."""

__version__ = "0.1.0"
