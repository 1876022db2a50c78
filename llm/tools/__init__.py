"""Programs before and after a training."""
