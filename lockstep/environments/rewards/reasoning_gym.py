"""The reward of tasks of the `reasoning-gym` package: each task's own score, between 0 and 1."""

from __future__ import annotations

from typing import Any

from ...errors import refuse
from .calls import completion_text


def reasoning_gym(
    prompts: list[Any], completions: list[Any], answer: list[Any], metadata: list[Any], **_: Any
) -> list[float]:
    """The score by the task of the data, reasoning_gym:NAME, of the text between the last answer tags, or without tags,
    of the whole completion. Raises `InputError` for rows of other data."""
    from reasoning_gym import get_score_answer_fn
    from reasoning_gym.utils import extract_answer

    found = []
    for prompt, completion, expected, about in zip(prompts, completions, answer, metadata, strict=True):
        refuse(not isinstance(about, dict) or "source_dataset" not in about, "needs rows of --data reasoning_gym:NAME")
        text = completion_text(completion)
        tagged = extract_answer(text)
        entry = {"question": completion_text(prompt), "answer": expected, "metadata": about}
        score = get_score_answer_fn(about["source_dataset"])(text.strip() if tagged is None else tagged, entry)
        found.append(float(score))
    return found
