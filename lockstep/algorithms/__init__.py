"""Advantages and losses: the mathematics of policy optimization."""
