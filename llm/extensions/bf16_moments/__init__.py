"""AdamW's moments in bfloat16, rounded stochastically (`--moment_dtype bf16`)."""
