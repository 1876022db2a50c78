"""A run's folder and the checkpoints in it."""
