"""Tasks by name."""
