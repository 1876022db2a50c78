"""Steps under PyTorch's profiler (`--profile`)."""
