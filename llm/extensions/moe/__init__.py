"""Mixtures of experts: routers are balanced, and the load of each expert is measured."""
