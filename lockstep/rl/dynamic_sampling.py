"""Dynamic sampling: prompts whose samples teach nothing are replaced by further ones (DAPO, arXiv 2503.14476, 3.2)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ..environments.collect import Collected, added
from ..types import RolloutGroup

# Collects the groups of some prompts, given as pairs: the group's number, and the how-manieth of the step's prompts.
Sample = Callable[[list[tuple[int, int]]], Collected]


def collect_with_signal(
    prompts: int, most: int, sample: Sample, has_signal: Callable[[RolloutGroup], bool]
) -> tuple[Collected, int]:
    """`prompts` groups that have a signal, and how many prompts that took; when another round would take more than
    `most`, groups without one fill the step. Groups that were replaced are among those without a reward.

    What replaces group n has the number n + `prompts`: shards stay as large, and no two groups have the same random
    numbers.
    """
    wanted, used = list(range(prompts)), 0
    kept: list[RolloutGroup] = []
    replaced: list[RolloutGroup] = []
    rounds: list[Collected] = []
    while True:
        found = sample([(number, used + i) for i, number in enumerate(wanted)])
        used += len(wanted)
        rounds.append(found)
        idle: list[RolloutGroup] = []
        for group in found.groups:
            (kept if has_signal(group) else idle).append(group)
        replaced += found.without_reward
        full = {group.group for group in kept}
        wanted = [number + prompts for number in wanted if number not in full]
        if not wanted or used + len(wanted) > most:
            break
        replaced += [replace(group, replaced=True) for group in idle]
    kept += idle
    counts = added(rounds) | {"dynamic_sampling/prompts": used, "dynamic_sampling/rounds": len(rounds)}
    kept.sort(key=lambda group: group.group % prompts)
    return Collected(kept, sorted(replaced, key=lambda group: group.group), counts), used
