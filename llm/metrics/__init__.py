"""What a run measures: loss, throughput, memory, profiles."""
