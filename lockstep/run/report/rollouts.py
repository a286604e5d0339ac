"""Sample rollouts: the best, the worst and the longest of the first and of the last step."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..metrics import EXCLUSION_FLAGS
from .page import format_duration, format_text
from .record import Record, as_float

Waits = Mapping[tuple[int, Any, Any], list[Any]]  # the seconds of each turn, by step, group and sample

_PROMPT_SHOWN = 280
_FACTS = {"reward": "reward", "advantage": "advantage", "tokens": "tokens", "finish_reason": "ended by"}


@dataclass(frozen=True)
class Sample:
    """A sample to be shown; `title` says what it is, such as "Best". `turns`: (name, text, style) of each."""

    title: str
    group: Any
    facts: str
    prompt: Any
    turns: list[tuple[str, Any, str]]

    @property
    def long(self) -> bool:
        """Whether the prompt would fill the card."""
        return len(format_text(self.prompt)) > _PROMPT_SHOWN


def choose_samples(record: Record) -> dict[int, list[Sample]]:
    """The chosen samples by step, counted from 0; fewer than three if a step has fewer."""
    waits = record.waits()
    return {step: _choose_of_step(groups, step, waits) for step, groups in record.rollouts().items()}


def _choose_of_step(groups: list[dict[str, Any]], step: int, waits: Waits) -> list[Sample]:
    trained = [group for group in groups if not any(group.get(name) for name in EXCLUSION_FLAGS)]
    samples = [(group, sample) for group in trained for sample in group.get("samples", [])]
    found = []
    for title, by, sign in (("Best", "reward", 1), ("Worst", "reward", -1), ("Longest", "tokens", 1)):
        if samples:
            ranks = [sign * _value(sample, by) for _, sample in samples]
            group, sample = samples.pop(ranks.index(max(ranks)))
            prompt = _own_prompt(sample) or _prompt_text(group.get("prompt"))
            facts = ", ".join(filter(None, (_trajectory_name(group, sample), _facts(sample))))
            waited = waits.get((step, group.get("group"), sample.get("sample")), [])
            found.append(Sample(title, group.get("group"), facts, prompt, _turns(sample, waited)))
    return found


def _value(sample: dict[str, Any], name: str) -> float:
    value = as_float(sample.get(name))
    return 0.0 if value is None or math.isnan(value) else value


def _trajectory_name(group: dict[str, Any], sample: dict[str, Any]) -> str:
    """The sample's name for `lockstep replay --trajectory`; empty if the record does not have its numbers."""
    numbers = [group.get("step"), group.get("group"), sample.get("sample")]
    return f"trajectory {'/'.join(map(str, numbers))}" if all(type(n) is int for n in numbers) else ""


def _facts(sample: dict[str, Any]) -> str:
    facts = ", ".join(f"{label} {format_text(sample[name])}" for name, label in _FACTS.items() if name in sample)
    each = sample.get("rewards") or {}
    return facts + (f" ({_format_rewards(each)})" if len(each) > 1 else "")


def _format_rewards(rewards: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {format_text(value)}" for name, value in rewards.items())


def _turns(sample: dict[str, Any], waited: Sequence[Any]) -> list[tuple[str, Any, str]]:
    """The segments after the prompt. With several turns, each has a name: sampled ones with rewards and the seconds
    until they were answered, and the given ones between them."""
    segments = sample.get("segments")
    turns = segments[1:] if isinstance(segments, list) and len(segments) > 2 else []
    if not turns or not all(isinstance(turn, dict) for turn in turns):
        return [("", sample.get("text"), "")]
    answered, found = iter(waited), []
    for turn in turns:
        kind = f"{format_text(turn.get('kind'))}{' anew, a branch' if turn.get('anew') else ''}"
        facts, given = [f"{kind}, {format_text(turn.get('tokens'))} tokens"], turn.get("kind") == "given"
        if isinstance(rewards := turn.get("rewards"), dict):
            facts.append(f"reward: {_format_rewards(rewards)}")
        if not given and (seconds := as_float(next(answered, None))) is not None:
            facts.append(f"answered in {format_duration(seconds)}")
        found.append((", ".join(facts), turn.get("text"), "prompt" if given else "said"))
    return found


def _own_prompt(sample: dict[str, Any]) -> Any:
    """The text of a sample's prompt if it is not the group's."""
    segments = sample.get("segments")
    first = segments[0] if isinstance(segments, list) and segments else None
    return first.get("text") if isinstance(first, dict) else None


def _prompt_text(prompt: Any) -> Any:
    """A prompt's text, or its messages joined into one text."""
    if isinstance(prompt, list) and all(isinstance(message, dict) for message in prompt):
        return "\n".join(f"{message.get('role')}: {format_text(message.get('content'))}" for message in prompt)
    return prompt
