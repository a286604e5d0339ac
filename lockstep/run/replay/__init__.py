"""Sampling a recorded trajectory of a run again."""

from .again import replay
