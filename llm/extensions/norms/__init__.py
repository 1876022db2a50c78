"""Norms by layer, and the largest attention logits."""
