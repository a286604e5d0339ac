"""The reinforcement learning loop, and supervised steps before it."""
