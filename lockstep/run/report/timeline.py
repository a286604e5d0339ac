"""A typical step as lanes of bars over its seconds, from the run's timeline."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median_low

from ...timings import Span
from ..timeline import read_timeline
from .charts import COLOURS, ticks
from .page import duration

# Phase, and what it is called; the first have colours of their own, the rest share the last.
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
_LABELLED = 0.12  # of the width, from which on a bar has its name on it


@dataclass(frozen=True)
class Bar:
    """A phase: where it begins and how long it takes, in hundredths of the step, and what is told of it."""

    left: float
    width: float
    colour: int
    label: str
    told: str


@dataclass(frozen=True)
class TypicalStep:
    """A step, to be drawn. `ticks`: (hundredths of it, seconds). `key`: (colour, phase and its seconds)."""

    title: str
    lanes: dict[str, list[Bar]]
    ticks: list[tuple[float, float]]
    key: list[tuple[int, str]]
    file: str


def typical_step(path: Path) -> TypicalStep | None:
    """The step of median length in the timeline at `path`; None without one."""
    spans = read_timeline(path)
    steps = [(of, s) for of, s in spans if s.name == "step" and not s.on_device and s.seconds > 0]
    if not steps:
        return None
    middle = median_low(span.seconds for _, span in steps)
    process, step = next(item for item in steps if item[1].seconds == middle)
    parts = [s for of, s in read_timeline(path) if of == process and s.name != step.name and _within(s, step)]
    on_host, on_device = ([span for span in parts if span.on_device is device] for device in (False, True))
    outer = _outermost(on_host)
    lanes = {
        "the host": outer,
        "its parts": _outermost([span for span in on_host if span not in outer]),
        "the device": [
            span for span in on_device if not any(_within(other, span) for other in on_device if other != span)
        ],
    }
    number = step.facts.get("step")
    which = f"Step {number + 1}" if isinstance(number, int) else "The step"
    return TypicalStep(
        f"{which}, of median length among {len(steps):,} recorded: {duration(step.seconds)}",
        {label: [_bar(span, step) for span in spans] for label, spans in lanes.items() if spans},
        [(100 * tick / step.seconds, tick) for tick in ticks(0, step.seconds) if tick <= step.seconds],
        _key(span for spans in lanes.values() for span in spans),
        path.name,
    )


def _within(span: Span, other: Span) -> bool:
    """Whether `span` is a part of `other`. Ends that meet were rounded, so its middle decides."""
    middle = span.began + span.seconds / 2
    return span.seconds <= other.seconds and other.began <= middle < other.began + other.seconds


def _outermost(spans: Sequence[Span]) -> list[Span]:
    """Those that lie in no other."""
    found: list[Span] = []
    for span in sorted(spans, key=lambda span: (span.began, -span.seconds)):
        if not found or not _within(span, found[-1]):
            found.append(span)
    return found


def _colour(name: str) -> int:
    return min(list(NAMES).index(name), COLOURS - 1) if name in NAMES else COLOURS - 1


def _called(name: str) -> str:
    return NAMES.get(name, name.replace("_", " "))


def _bar(span: Span, step: Span) -> Bar:
    left, width = (100 * seconds / step.seconds for seconds in (span.began - step.began, span.seconds))
    facts = "".join(f", {value} {name}" for name, value in span.facts.items())
    name = _called(span.name)
    told = f"{name}{facts}: {duration(span.seconds)}"
    return Bar(left, width, _colour(span.name), name if width > 100 * _LABELLED else "", told)


def _key(spans: Iterable[Span]) -> list[tuple[int, str]]:
    """Colour, name and seconds of each phase: the device's where it measured."""
    spans = list(spans)
    measured = {span.name for span in spans if span.on_device}
    parts = []
    for name in dict.fromkeys(span.name for span in spans):
        each = [s.seconds for s in spans if s.name == name and s.on_device == (name in measured)]
        times = f" in {len(each)}" if len(each) > 1 else ""
        parts.append((_colour(name), f"{_called(name)} {duration(sum(each))}{times}"))
    return parts
