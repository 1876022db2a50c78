"""Plans a run before it is queued: memory, traffic, time. Run `python -m llm.plan`."""
