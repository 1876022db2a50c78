"""The GPT pretrainer: `python -m llm.trainers.gpt`."""
