"""Optimizers by name: any class of `torch.optim.Optimizer` (`--optimizer package.module:Class`)."""
