"""The search for the largest micro-batch that fits (`--per_device_train_batch_size auto`)."""
