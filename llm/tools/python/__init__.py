"""The programs as Python functions: `llm.train(...)`, for scripts and notebooks."""
