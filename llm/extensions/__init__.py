"""What some runs need: delete a folder, and its two lines in `trainers/gpt/extensions.py`."""
