"""The process: rank, device, random numbers, signals, log, files, health."""
