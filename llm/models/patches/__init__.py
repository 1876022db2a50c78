"""Changes to a model from outside that keep its results."""
