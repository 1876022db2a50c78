"""Loss, throughput, memory, and profiles of a run."""
