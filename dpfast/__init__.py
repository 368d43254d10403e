"""Per-sample gradients for PyTorch, at the speed of the hardware."""
