"""Ways to capture a function."""
