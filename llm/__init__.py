"""Pretraining of GPT-like language models, exact and fast."""

__version__ = "0.2.0"
