"""Features of some runs. To remove one, delete its folder and its lines in `extensions.py`."""
