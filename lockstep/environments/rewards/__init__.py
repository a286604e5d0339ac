"""Reward functions: loaded by name, called safely, and combined."""
