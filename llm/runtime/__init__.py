"""The process: its launcher, ranks, device, random numbers, signals, log, files and health."""
