"""Plays many trajectories at once: sampled turns go to their environments, and what these give is sampled after.

The generator never waits for an environment while there is anything to sample. No bit depends on which environment
answers first: random numbers are keyed by a token's trajectory and position, and cached pages are found by tokens.
"""

from .episode import (
    Episode,
    EpisodeContext,
    Failures,
    GroupRequest,
    Limits,
    MakeSampler,
    SampleOutput,
    Sampler,
)
from .runner import EpisodeRunner
