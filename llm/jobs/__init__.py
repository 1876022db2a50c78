"""Job scripts for Slurm and PBS: `python -m llm.jobs`."""
