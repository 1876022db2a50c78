"""Labels of tokens, as torch's cross-entropy takes them."""

IGNORED = -100
"""The label of a token that has no loss."""
