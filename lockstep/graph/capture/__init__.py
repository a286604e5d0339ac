"""Ways to capture a function as a graph."""
