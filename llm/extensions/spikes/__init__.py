"""Loss spikes: reported with their samples; a run can stop or go back to a checkpoint."""
