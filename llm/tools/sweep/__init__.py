"""Runs that differ in some options, in one folder: `llm-trainers sweep`."""
