"""Loss spikes: reports, stops, and returns to a checkpoint."""
