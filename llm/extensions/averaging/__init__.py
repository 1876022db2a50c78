"""A moving average of the weights."""
