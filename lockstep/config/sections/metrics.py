"""Section `metrics`."""

from collections.abc import Iterator
from dataclasses import dataclass

from ...errors import did_you_mean_note, refuse
from .section import Section

TRACKER_PACKAGES = "tensorboard", "wandb", "trackio"


@dataclass(frozen=True)
class MetricsConfig(Section):
    """What a run writes and shows."""

    progress: bool = True
    """Show the live display (plain lines if standard error is not a terminal)."""
    rollouts: bool = True
    """Write rollouts.jsonl."""
    trackers: tuple[str, ...] = ()
    """What gets every step's metrics too: tensorboard, wandb or trackio, each an optional extra; or a function of your
    own, as module:function or path.py:function, called with (step, metrics). None by default: nothing phones home."""
    project: str = "lockstep"
    """Project name for the run (wandb, trackio)."""

    def check(self) -> None:
        for name in self.trackers:
            known, note = ", ".join(TRACKER_PACKAGES), did_you_mean_note(name, TRACKER_PACKAGES)
            refuse(
                name not in TRACKER_PACKAGES and ":" not in name,
                f"metrics.trackers has {name!r}{note}; allowed are {known}, or a function of your own, as "
                "module:function or path.py:function",
            )
        refuse(len(set(self.trackers)) < len(self.trackers), "metrics.trackers names one twice; give each once")

    def ineffective_fields(self) -> Iterator[tuple[str, str]]:
        if not {"wandb", "trackio"} & {*self.trackers}:
            yield "project", "without wandb or trackio among metrics.trackers; add one or remove the project"
