"""Optimizer groups and learning-rate schedules."""
