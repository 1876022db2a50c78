"""The folder of a run and its checkpoints: save, verify, load, prune."""
