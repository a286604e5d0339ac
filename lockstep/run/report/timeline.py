"""A typical step from the run's timeline, as rows of bars over time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median_low

from ...timings import Span
from ..timeline import read_timeline
from .charts import COLOURS, ticks
from .page import format_duration

# Phases and their names. The first have colours of their own; the rest share the last colour.
NAMES = {
    "generate": "generation",
    "forward_backward": "forward and backward",
    "optim_step": "optimizer step",
    "prefill": "prefill",
    "decode": "decode",
    "read": "reading results",
    "rewards": "rewards",
    "critic": "the critic's values",
    "encode": "encoding prompts",
    "advantages": "advantages",
    "pack": "packing",
    "sync": "weight sync",
}
_LABELLED = 0.12  # bars at least this fraction of the width carry their name


@dataclass(frozen=True)
class Bar:
    """A phase: its start and duration in percent of the step, and a description, `description`."""

    left: float
    width: float
    colour: int
    label: str
    description: str


@dataclass(frozen=True)
class TypicalStep:
    """A step to be drawn. `ticks`: (percent of the step, seconds). `legend`: (colour, phase with its seconds)."""

    title: str
    rows: dict[str, list[Bar]]
    ticks: list[tuple[float, float]]
    legend: list[tuple[int, str]]
    file: str


def typical_step(path: Path) -> TypicalStep | None:
    """The step of median length in the timeline at `path`; None if there is no step."""
    spans = read_timeline(path)
    steps = [(of, s) for of, s in spans if s.name == "step" and not s.on_device and s.seconds > 0]
    if not steps:
        return None
    middle = median_low(span.seconds for _, span in steps)
    process, step = next(item for item in steps if item[1].seconds == middle)
    parts = [s for of, s in read_timeline(path) if of == process and s.name != step.name and _is_within(s, step)]
    on_host, on_device = ([span for span in parts if span.on_device is device] for device in (False, True))
    outer = _outermost(on_host)
    rows = {
        "the host": outer,
        "its parts": _outermost([span for span in on_host if span not in outer]),
        "the device": [
            span for span in on_device if not any(_is_within(other, span) for other in on_device if other != span)
        ],
    }
    number = step.facts.get("step")
    which = f"Step {number + 1}" if isinstance(number, int) else "The step"
    return TypicalStep(
        f"{which}, of median length among {len(steps):,} recorded: {format_duration(step.seconds)}",
        {label: [_bar(span, step) for span in spans] for label, spans in rows.items() if spans},
        [(100 * tick / step.seconds, tick) for tick in ticks(0, step.seconds) if tick <= step.seconds],
        _legend(span for spans in rows.values() for span in spans),
        path.name,
    )


def _is_within(span: Span, other: Span) -> bool:
    """Whether `span` lies within `other`. Its middle decides, since ends are rounded."""
    middle = span.began + span.seconds / 2
    return span.seconds <= other.seconds and other.began <= middle < other.began + other.seconds


def _outermost(spans: Sequence[Span]) -> list[Span]:
    """The spans that lie in no other."""
    found: list[Span] = []
    for span in sorted(spans, key=lambda span: (span.began, -span.seconds)):
        if not found or not _is_within(span, found[-1]):
            found.append(span)
    return found


def _colour(name: str) -> int:
    return min(list(NAMES).index(name), COLOURS - 1) if name in NAMES else COLOURS - 1


def _phase_name(name: str) -> str:
    return NAMES.get(name, name.replace("_", " "))


def _bar(span: Span, step: Span) -> Bar:
    left, width = (100 * seconds / step.seconds for seconds in (span.began - step.began, span.seconds))
    facts = "".join(f", {value} {name}" for name, value in span.facts.items())
    name = _phase_name(span.name)
    description = f"{name}{facts}: {format_duration(span.seconds)}"
    return Bar(left, width, _colour(span.name), name if width > 100 * _LABELLED else "", description)


def _legend(spans: Iterable[Span]) -> list[tuple[int, str]]:
    """Colour, and name with seconds, of each phase; the seconds are the device's if it measured them."""
    spans = list(spans)
    measured = {span.name for span in spans if span.on_device}
    parts = []
    for name in dict.fromkeys(span.name for span in spans):
        each = [s.seconds for s in spans if s.name == name and s.on_device == (name in measured)]
        times = f" in {len(each)}" if len(each) > 1 else ""
        parts.append((_colour(name), f"{_phase_name(name)} {format_duration(sum(each))}{times}"))
    return parts
