"""Checks of a machine, written into one file that a user can send: `llm-trainers evidence`."""
