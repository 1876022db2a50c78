"""The training programs."""
