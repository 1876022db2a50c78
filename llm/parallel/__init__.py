"""Layouts: how an optimizer step is spread over devices."""
