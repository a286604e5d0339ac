"""From problems to scored groups: encode the prompts, generate, score. Advantages come later."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from .errors import InputError
from .tasks.base import Problem
from .tasks.rewards import RewardSet
from .types import Completion, Rollout, RolloutGroup, SampleIdentity, SamplingParams

Prompt = str | list[dict[str, Any]]
Problems = Sequence[tuple[int, Problem]]  # each with its group

# generate(prompt_ids, sampling, identities): for each prompt its `sampling.n` completions, whose identities are the
# prompt's with sample 0 to n - 1.
Generate = Callable[[list[list[int]], list[SamplingParams], list[SampleIdentity]], list[list[Completion]]]


def collect(
    problems: Problems,
    encode: Callable[[Prompt], list[int]],
    generate: Generate,
    sampling: SamplingParams,
    seed: int,
    domain: int,
    step: int,
    rewards: RewardSet,
    max_prompt_length: int | None = None,
) -> list[RolloutGroup]:
    """Sample `sampling.n` completions of each (group, problem) and score them, all functions on the whole batch.

    `seed`, `domain`, `step` and the group key the random numbers (`SampleIdentity`). `max_prompt_length` is in
    tokens; None is no limit.

    Raises `InputError` naming the group, and its data row, for a prompt that is empty or too long, and whatever
    scoring refuses.
    """
    prompt_ids = [_encode(encode, *item, step, max_prompt_length) for item in problems]
    identities = [SampleIdentity(seed, domain, step, group) for group, _ in problems]
    completions = generate(prompt_ids, [sampling] * len(problems), identities)
    assert [len(samples) for samples in completions] == [sampling.n] * len(problems)
    groups = [
        RolloutGroup(
            group=group,
            prompt=problem.prompt,
            prompt_ids=ids,
            rollouts=[Rollout(completion, rewards={}, reward=0.0) for completion in samples],
            sampling=sampling,
            columns=problem.columns,
        )
        for (group, problem), ids, samples in zip(problems, prompt_ids, completions, strict=True)
    ]
    _score(groups, rewards, step)
    return groups


def _encode(
    encode: Callable[[Prompt], list[int]], group: int, problem: Problem, step: int, limit: int | None
) -> list[int]:
    where = f"step {step} group {group}" + (f" ({problem.origin})" if problem.origin else "")
    try:
        ids = encode(problem.prompt)
    except InputError as error:
        raise InputError(f"{where}: {error}") from error
    if not ids:
        raise InputError(f"{where}: the prompt has no tokens")
    if limit is not None and len(ids) > limit:
        raise InputError(f"{where}: the prompt has {len(ids)} tokens; at most {limit} are allowed")
    return ids


def _score(groups: list[RolloutGroup], rewards: RewardSet, step: int) -> None:
    """Fill in every rollout's `rewards` and `reward`."""
    if not groups:
        return
    rollouts = [(group, rollout) for group in groups for rollout in group.rollouts]
    values, totals = rewards.score(
        prompts=[group.prompt for group, _ in rollouts],
        completions_text=[rollout.completion.text for _, rollout in rollouts],
        completion_ids=[rollout.completion.token_ids for _, rollout in rollouts],
        columns_rows=[group.columns for group, _ in rollouts],
        where=f"step {step}, groups {groups[0].group} to {groups[-1].group}",
    )
    for (_, rollout), row, total in zip(rollouts, values, totals, strict=True):
        rollout.rewards, rollout.reward = row, total
