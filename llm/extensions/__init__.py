"""Features of some runs. To remove one, delete its folder and its two lines in
`trainers/gpt/extensions.py`."""
