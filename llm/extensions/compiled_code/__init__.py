"""Compiled code in a folder, so that a later start runs the same (`--compiled_code`)."""
