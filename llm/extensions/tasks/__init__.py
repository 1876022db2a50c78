"""Tasks of lm-eval on the model that trains, and their data for a machine without a network."""
