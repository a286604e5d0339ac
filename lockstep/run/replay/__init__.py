"""Sampling a recorded trajectory of a run again."""

from .resample import replay
