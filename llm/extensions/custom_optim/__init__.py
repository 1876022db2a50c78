"""Any class of `torch.optim.Optimizer` (`--optimizer package.module:Class`)."""
