"""What a run measures and tells."""
