"""A trajectory of a run's record, sampled again."""

from .again import replay
