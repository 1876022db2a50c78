"""Some steps of a run under PyTorch's profiler (`--profile`)."""
