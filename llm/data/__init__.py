"""Text and token files to micro-batches on the device."""
