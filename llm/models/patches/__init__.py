"""Changes to a model that leave its results as they are."""
