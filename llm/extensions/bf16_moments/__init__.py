"""AdamW's moments in bfloat16 (`--moment_dtype bf16`)."""
