"""Sample rollouts: the best, the worst and the longest of the first and of the last step, side by side."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from .page import text
from .record import Record, as_float

_PROMPT_SHOWN = 280
_FACTS = {"reward": "reward", "advantage": "advantage", "tokens": "tokens", "finish_reason": "ended by"}


@dataclass(frozen=True)
class Sample:
    """One sample, by what it is: "Best". A `long` prompt is folded."""

    title: str
    group: Any
    facts: str
    prompt: Any
    turns: list[tuple[str, Any]]

    @property
    def long(self) -> bool:
        """Whether the prompt would fill the card."""
        return len(text(self.prompt)) > _PROMPT_SHOWN


def rollouts(record: Record) -> dict[int, list[Sample]]:
    """The samples by step, counted from 0. With too few to differ, fewer."""
    return {step: _chosen(groups) for step, groups in record.rollouts().items()}


def _chosen(groups: list[dict[str, Any]]) -> list[Sample]:
    trained = [group for group in groups if not group.get("replaced")]  # by dynamic sampling
    samples = [(group, sample) for group in trained for sample in group.get("samples", [])]
    found = []
    for title, by, sign in (("Best", "reward", 1), ("Worst", "reward", -1), ("Longest", "tokens", 1)):
        if samples:
            ranks = [sign * _value(sample, by) for _, sample in samples]
            group, sample = samples.pop(ranks.index(max(ranks)))
            prompt = _messages(group.get("prompt"))
            facts = ", ".join(filter(None, (_name(group, sample), _facts(sample))))
            found.append(Sample(title, group.get("group"), facts, prompt, _turns(sample)))
    return found


def _value(sample: dict[str, Any], name: str) -> float:
    value = as_float(sample.get(name))
    return 0.0 if value is None or math.isnan(value) else value


def _name(group: dict[str, Any], sample: dict[str, Any]) -> str:
    """What `lockstep replay --trajectory` calls it; nothing where the record does not tell."""
    numbers = [group.get("step"), group.get("group"), sample.get("sample")]
    return f"trajectory {'/'.join(map(str, numbers))}" if all(type(n) is int for n in numbers) else ""


def _facts(sample: dict[str, Any]) -> str:
    facts = ", ".join(f"{label} {text(sample[name])}" for name, label in _FACTS.items() if name in sample)
    each = sample.get("rewards") or {}
    if len(each) > 1:
        facts += " (" + ", ".join(f"{name} {text(value)}" for name, value in each.items()) + ")"
    return facts


def _turns(sample: dict[str, Any]) -> list[tuple[str, Any]]:
    """What came after the prompt, with a name over each where there were several turns: what was sampled and what was
    given between."""
    segments = sample.get("segments")
    turns = segments[1:] if isinstance(segments, list) and len(segments) > 2 else []
    if not turns or not all(isinstance(turn, dict) for turn in turns):
        return [("", sample.get("text"))]
    names = [f"{text(turn.get('kind'))}{' anew, a branch' if turn.get('anew') else ''}" for turn in turns]
    return [(f"{n}, {text(turn.get('tokens'))} tokens", turn.get("text")) for n, turn in zip(names, turns, strict=True)]


def _messages(prompt: Any) -> Any:
    """A prompt's text, or its messages as one."""
    if isinstance(prompt, list) and all(isinstance(message, dict) for message in prompt):
        return "\n".join(f"{message.get('role')}: {text(message.get('content'))}" for message in prompt)
    return prompt
