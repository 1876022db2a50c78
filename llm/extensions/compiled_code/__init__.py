"""Compiled code in a folder (`--compiled_code`)."""
