"""The GPT pretrainer: `llm-trainers train`."""
