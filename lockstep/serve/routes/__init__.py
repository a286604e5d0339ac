"""The model's routes."""
