"""The run folder and its checkpoints: save, verify, load, prune."""
