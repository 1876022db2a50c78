"""Changes to a model from outside that leave its results as they are."""
