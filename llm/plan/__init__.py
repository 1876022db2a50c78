"""Memory, traffic and time of a run before it is queued: `python -m llm.plan`."""
