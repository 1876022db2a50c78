"""Writes job scripts for the schedulers of clusters."""
