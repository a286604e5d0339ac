"""A typical step as lanes of bars over its seconds, from the run's timeline."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from statistics import median_low

from ...timings import Span
from ..timeline import read_timeline
from .charts import COLOURS, ticks
from .page import card, duration

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


def typical_step(path: Path) -> str:
    """A card with the step of median length in the timeline at `path`; nothing without one."""
    spans = read_timeline(path)
    steps = [(of, s) for of, s in spans if s.name == "step" and not s.on_device and s.seconds > 0]
    if not steps:
        return ""
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
    shown = "".join(_lane(label, spans, step) for label, spans in lanes.items() if spans)
    number = step.facts.get("step")
    which = f"Step {number + 1}" if isinstance(number, int) else "The step"
    lead = f'<p class="dim">{which}, of median length among {len(steps):,} recorded: {duration(step.seconds)}</p>'
    drawn = [span for spans in lanes.values() for span in spans]
    return card("A typical step", lead + shown + _axis(step.seconds) + _key(drawn), path.name, style="whole")


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


def _lane(label: str, spans: Iterable[Span], step: Span) -> str:
    bars = "".join(_bar(span, step) for span in spans)
    return f'<div class="lane"><span>{escape(label)}</span><div>{bars}</div></div>'


def _bar(span: Span, step: Span) -> str:
    left, width = (100 * seconds / step.seconds for seconds in (span.began - step.began, span.seconds))
    facts = "".join(f", {value} {name}" for name, value in span.facts.items())
    name = escape(_called(span.name))
    told = f"{name}{escape(facts)}: {duration(span.seconds)}"
    shown = name if width > 100 * _LABELLED else ""
    style = f"left:{left:.3f}%;width:{width:.3f}%"
    return f'<div class="b{_colour(span.name)}" style="{style}" title="{told}">{shown}</div>'


def _axis(seconds: float) -> str:
    marks = [tick for tick in ticks(0, seconds) if tick <= seconds]
    shown = "".join(f'<span style="left:{100 * tick / seconds:.2f}%">{duration(tick)}</span>' for tick in marks)
    return f'<div class="lane axis-of-time"><div>{shown}</div></div>'


def _key(spans: Iterable[Span]) -> str:
    """Colour, name and seconds of each phase: the device's where it measured."""
    spans = list(spans)
    measured = {span.name for span in spans if span.on_device}
    parts = []
    for name in dict.fromkeys(span.name for span in spans):
        each = [s.seconds for s in spans if s.name == name and s.on_device == (name in measured)]
        times = f" in {len(each)}" if len(each) > 1 else ""
        told = f"{_called(name)} {duration(sum(each))}{times}"
        parts.append(f'<span><i class="b{_colour(name)}"></i>{escape(told)}</span>')
    return f'<div class="key">{"".join(parts)}</div>'
