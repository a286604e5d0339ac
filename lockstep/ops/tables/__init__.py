"""Which kernel computes which shape, as measured."""
