"""The report of one or several runs: `python -m llm.report runs/NAME`."""
