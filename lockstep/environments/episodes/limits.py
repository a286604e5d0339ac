"""What a trajectory may have."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """Of a trajectory: the tokens of its prompt and those after it (None: no limit but a turn's), its turns, and the
    seconds that its environment may take to answer (0: any); in words where the first comes from; the rows that its
    branches may take together, where they must stand in one micro-batch; and the model's context, where no other holds
    a trajectory to it."""

    prompt_tokens: int | None = None
    response_tokens: int | None = None
    turns: int = 1
    timeout: float = 0.0
    prompt_reason: str = ""
    packed_tokens: int | None = None
    context: int | None = None
