"""Token labels as torch's cross-entropy expects them."""

IGNORED = -100
"""The label of a token that has no loss."""
