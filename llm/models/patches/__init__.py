"""Changes to a model from outside that do not change its results."""
