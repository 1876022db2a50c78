"""Loss, throughput, and memory of a run."""
