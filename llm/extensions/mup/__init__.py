"""muP: learning rates that transfer across widths (`--mup`)."""
