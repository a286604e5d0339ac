"""The gradient norm, by which gradients are clipped."""
