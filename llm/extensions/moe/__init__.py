"""Mixtures of experts: balance and load."""
