"""The process: launcher, rank, device, random numbers, signals, log, files, health."""
