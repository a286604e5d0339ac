"""Many trajectories at once: what is sampled goes to its environment, what that gives goes on being sampled.

The generator never waits for an environment while there is something to sample. No bit depends on who answered first:
tokens are keyed by the trajectory and their place in it, and a trajectory's pages are found again by their tokens.
"""

from .episode import FAILURES, Asked, Episode, Failures, Limits, NewTokens, Round, Sampler
from .play import Play
