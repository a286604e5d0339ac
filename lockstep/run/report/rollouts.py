"""Sample rollouts: the best, the worst and the longest of the first and of the last step, side by side."""

from __future__ import annotations

import math
from html import escape
from typing import Any

from .page import folded, preformatted, section, text
from .record import Record, as_float

_PROMPT_SHOWN = 280


def rollouts(record: Record) -> str:
    """The section; nothing without rollouts."""
    parts = []
    for step, groups in record.rollouts().items():
        if chosen := _chosen(groups):
            cards = "".join(_card(title, group, sample) for title, group, sample in chosen)
            parts.append(f'<p class="lead">Step {step + 1}</p><div class="grid">{cards}</div>')
    return section("Sample rollouts", "".join(parts))


def _chosen(groups: list[dict[str, Any]]) -> list[tuple[str, dict[str, Any], dict[str, Any]]]:
    """(what it is, its group, the sample). With too few samples to differ, fewer."""
    samples = [(group, sample) for group in groups for sample in group.get("samples", [])]
    found = []
    for title, by, sign in (("Best", "reward", 1), ("Worst", "reward", -1), ("Longest", "tokens", 1)):
        if samples:
            ranks = [sign * _value(sample, by) for _, sample in samples]
            found.append((title, *samples.pop(ranks.index(max(ranks)))))
    return found


def _value(sample: dict[str, Any], name: str) -> float:
    value = as_float(sample.get(name))
    return 0.0 if value is None or math.isnan(value) else value


def _card(title: str, group: dict[str, Any], sample: dict[str, Any]) -> str:
    names = {"reward": "reward", "advantage": "advantage", "tokens": "tokens", "finish_reason": "ended by"}
    facts = ", ".join(f"{label} {text(sample[name])}" for name, label in names.items() if name in sample)
    each = sample.get("rewards") or {}
    if len(each) > 1:
        facts += " (" + ", ".join(f"{name} {text(value)}" for name, value in each.items()) + ")"
    return (
        f'<div class="card"><div class="head"><h3>{escape(title)}</h3>'
        f'<span class="dim">group {escape(text(group.get("group")))}</span></div>'
        f'<p class="dim">{escape(facts)}</p>{_prompt(group.get("prompt"))}{_response(sample)}</div>'
    )


def _response(sample: dict[str, Any]) -> str:
    """What was sampled; of several turns also what was given between them, each under its name."""
    segments = sample.get("segments")
    turns = segments[1:] if isinstance(segments, list) and len(segments) > 2 else []
    if not turns or not all(isinstance(turn, dict) for turn in turns):
        return preformatted(sample.get("text"))
    return "".join(
        f'<p class="dim">{escape(text(turn.get("kind")))}, {escape(text(turn.get("tokens")))} tokens</p>'
        f"{preformatted(turn.get('text'))}"
        for turn in turns
    )


def _prompt(prompt: Any) -> str:
    """A prompt's text, or its messages, folded when long."""
    shown = prompt
    if isinstance(prompt, list) and all(isinstance(message, dict) for message in prompt):
        shown = "\n".join(f"{message.get('role')}: {text(message.get('content'))}" for message in prompt)
    block = preformatted(shown, "prompt")
    return folded("prompt", block) if len(text(shown)) > _PROMPT_SHOWN else block
