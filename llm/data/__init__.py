"""From text to micro-batches: sources, token files, order, loading."""
