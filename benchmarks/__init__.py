"""Measurements beside other programs; see README.md."""
