"""Dynamic sampling: prompts whose samples give no training signal are replaced (DAPO, arXiv 2503.14476, 3.2)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ..environments.collect import Collected, added
from ..types import RolloutGroup

# Collects the groups of some prompts, given as pairs: the group's number, and the prompt's index within the step.
Sample = Callable[[list[tuple[int, int]]], Collected]


def collect_with_signal(
    prompts: int, most: int, sample: Sample, has_signal: Callable[[RolloutGroup], bool]
) -> tuple[Collected, int]:
    """Collect `prompts` groups that have a signal; returns them and the number of prompts used. If another round would
    use more than `most`, groups without a signal fill the step. Replaced groups are in `Collected.without_reward`.

    The replacement of group n has the number n + `prompts`, so that round-robin shards keep their sizes and no two
    groups share random numbers.
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
