"""Section `checkpoint`."""

from collections.abc import Iterator
from dataclasses import dataclass

from .section import Section, at_least, between


@dataclass(frozen=True)
class CheckpointConfig(Section):
    """Checkpoints for resuming, and models to use (the final one is always exported)."""

    interval: int = at_least(0, default=0)
    """Save every this many steps and at the end; 0 is off, and the run cannot be resumed."""
    keep_last: int = at_least(1, default=2)
    """Checkpoints to keep."""
    grace: float = between(0.0, 86400.0, default=25.0)
    """Seconds that a run has, when Ctrl-C, SIGTERM or SIGHUP asks it to end, to save its last complete step; 0 ends it
    at once, and so does a second signal. torchrun kills after 30."""
    export_interval: int = at_least(0, default=0)
    """Also export the model every this many steps, as a Hugging Face folder models/step_N; 0 is off. All are kept."""

    def ineffective_fields(self) -> Iterator[tuple[str, str]]:
        if self.interval == 0:
            for name in ("keep_last", "grace"):
                yield name, "without checkpoints; set checkpoint.interval above 0, or remove it"
