"""How one optimizer step is spread over devices, each layout in one place."""
