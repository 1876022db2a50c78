"""Memory, traffic and time of a run before it is queued: `llm-trainers plan`."""
