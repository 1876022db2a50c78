"""Programs before and after a training: plan, jobs, report, checkpoints, inspect, and others."""
