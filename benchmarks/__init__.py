"""Measurements, also of other programs; see README.md."""
