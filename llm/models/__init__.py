"""Hugging Face causal language models on one device, and their loss."""
