"""The norm that gradients are clipped by."""
