"""muP: scales by which the best learning rate transfers across widths (`--mup`)."""
