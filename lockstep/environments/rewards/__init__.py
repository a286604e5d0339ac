"""Reward functions: found by name, called safely, combined."""
