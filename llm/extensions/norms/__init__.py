"""Norms of weights, gradients and updates by layer, and the largest attention logits."""
