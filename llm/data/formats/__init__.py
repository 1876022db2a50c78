"""Files of tokens on disk."""
