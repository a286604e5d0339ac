"""Reinforcement learning for language models: one model definition generates and trains, bit for bit identical."""

__version__ = "0.1.0"
