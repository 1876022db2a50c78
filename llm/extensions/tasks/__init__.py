"""Tasks of lm-eval during training."""
