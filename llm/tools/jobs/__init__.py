"""Job scripts for Slurm and PBS: `llm-trainers jobs`."""
