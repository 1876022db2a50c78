"""Hugging Face causal language models on one device, and the loss that trains them."""
