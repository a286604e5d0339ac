"""Dynamic sampling: prompts whose samples give no training signal are replaced (DAPO, arXiv 2503.14476, 3.2)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ..environments.collect import Collected, merge_counts
from ..types import RolloutGroup

# Collects the groups of some prompts, given as pairs: the group's number, and the prompt's index within the step.
Sample = Callable[[list[tuple[int, int]]], Collected]


def collect_with_signal(
    prompts: int, max_prompts: int, sample: Sample, has_signal: Callable[[RolloutGroup], bool]
) -> tuple[Collected, int]:
    """Collect `prompts` groups that have a signal; returns them and the number of prompts used. If another round would
    use more than `max_prompts`, groups without a signal fill the step. Replaced groups are in
    `Collected.without_reward`.

    The replacement of group n has the number n + `prompts`, so that round-robin shards keep their sizes and no two
    groups share random numbers.
    """
    numbers, used = list(range(prompts)), 0  # `numbers`: of the groups to sample next
    kept: list[RolloutGroup] = []
    excluded: list[RolloutGroup] = []
    rounds: list[Collected] = []
    while True:
        collected = sample([(number, used + i) for i, number in enumerate(numbers)])
        used += len(numbers)
        rounds.append(collected)
        excluded += collected.without_reward
        without_signal: list[RolloutGroup] = []
        for group in collected.groups:
            (kept if has_signal(group) else without_signal).append(group)
        filled = {group.group for group in kept}
        numbers = [number + prompts for number in numbers if number not in filled]
        if not numbers or used + len(numbers) > max_prompts:
            break
        excluded += [replace(group, replaced=True) for group in without_signal]
    kept += without_signal
    counts = merge_counts(rounds) | {"dynamic_sampling/prompts": used, "dynamic_sampling/rounds": len(rounds)}
    kept.sort(key=lambda group: group.group % prompts)
    return Collected(kept, sorted(excluded, key=lambda group: group.group), counts), used
