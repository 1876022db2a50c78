"""muP: scales that let the optimal learning rate transfer across widths (`--mup`)."""
