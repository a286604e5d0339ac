"""Section `metrics`."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from ...errors import refuse
from .section import Section


@dataclass(frozen=True)
class MetricsConfig(Section):
    """What a run writes and shows."""

    progress: bool = True
    """Show the live display (plain lines if standard error is not a terminal)."""
    rollouts: bool = True
    """Write rollouts.jsonl."""
    trackers: tuple[Literal["tensorboard", "wandb", "trackio"], ...] = ()
    """Trackers that get every step's metrics too; each is an optional extra. None by default: nothing phones home."""
    project: str = "lockstep"
    """Project name for the run (wandb, trackio)."""

    def check(self) -> None:
        refuse(len(set(self.trackers)) < len(self.trackers), "metrics.trackers names one twice; give each once")

    def ineffective_fields(self) -> Iterator[tuple[str, str]]:
        if not {"wandb", "trackio"} & {*self.trackers}:
            yield "project", "without wandb or trackio among metrics.trackers; add one or remove the project"
