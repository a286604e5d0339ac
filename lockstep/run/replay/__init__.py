"""`lockstep replay`: a trajectory of a run's record, sampled again alone, and compared bit by bit."""

from .again import replay
