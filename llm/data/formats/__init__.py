"""Token files on disk: Megatron-LM's pair, nanoGPT's flat file, and their sidecar."""
