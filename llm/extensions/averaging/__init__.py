"""A moving average of the weights: kept, evaluated, saved, and exported in their place."""
