"""Checks of a machine: `llm-trainers evidence`."""
