"""How one optimizer step is spread over devices."""
