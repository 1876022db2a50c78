"""The report of one or several runs: `llm-trainers report runs/NAME`."""
