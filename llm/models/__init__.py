"""Hugging Face causal language models, and the loss that trains them."""
