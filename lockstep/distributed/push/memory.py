"""Memory that the ranks of a group store into."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from .. import torch_private

SLOT = 1 << 19  # words that a rank stores at once into another's memory; of more, a collective is as fast
WORD_BYTES = 8  # of a word with its mark
PARITIES = 2  # slots a pair of ranks has: a rank is at most one launch ahead of another, which still reads


@dataclass(frozen=True)
class SharedMemory:
    """What a rank needs to store words into the memory of those of its group, and to know that theirs have come.

    Attributes:
        rank, ranks: this one's place in the group, and how many there are.
        patience: nanoseconds that a launch waits for the words of others.
        addresses: int64 [ranks + 1]: of each rank's slots, int64 [PARITIES, ranks, SLOT], in which the place of a slot
            is its sender's rank; and of `late`.
        state: int64 [2]: launches so far, and this launch's programs that have ended.
        late: on the host and written by the device: 0, or the number of the launch at which words did not come in time,
            times `ranks`, and whose words they are.
        held: what `addresses` points into.
        members: of the group, as the whole run numbers them.
    """

    rank: int
    ranks: int
    patience: int
    addresses: Tensor
    state: Tensor
    late: Tensor
    held: object = None
    members: tuple[int, ...] = ()


class LateWords(NamedTuple):
    """Words that did not come in time: of which rank of the run, in which group, at which of the group's launches."""

    rank: int
    group: str
    launch: int


_BY_GROUP: dict[str, SharedMemory] = {}


def own_slots(ranks: int, device: torch.device) -> Tensor:
    """Memory that the ranks of a group can be given, for `share_memory`."""
    return torch_private.symmetric_bytes(WORD_BYTES * PARITIES * ranks * SLOT, device)


def share_memory(name: str, group: dist.ProcessGroup, own: Tensor, timeout: float) -> SharedMemory:
    """Share the slots of a group's ranks, all of which call this, for those that ask for them by the group's name. They
    may be used when all have returned.

    Args:
        timeout: seconds that a launch waits for the words of others.

    Raises:
        RuntimeError: the GPUs of the group do not reach one another's memory.
    """
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    (slots, mapped), device = torch_private.symmetric_memory(own, group), own.device
    late = torch.zeros(1, dtype=torch.int64, pin_memory=True)
    addresses = torch.tensor([*slots, late.data_ptr()], device=device)
    state = torch.zeros(2, dtype=torch.int64, device=device)
    own.zero_()  # marks of no launch
    torch.cuda.synchronize(device)
    members = tuple(dist.get_process_group_ranks(group))
    made = SharedMemory(rank, ranks, int(timeout * 1e9), addresses, state, late, (own, mapped), members)
    _BY_GROUP[name] = made
    return made


def shared_memory(group: str) -> SharedMemory:
    """What `share_memory` made for a group, by the name that graphs have for it."""
    return _BY_GROUP[group]


def forget_memory(group: str) -> None:
    """Undo `share_memory`, where it was called."""
    _BY_GROUP.pop(group, None)


def late_words() -> LateWords | None:
    """Those that this process waited for in vain, if any: the device's later errors follow from that."""
    for name, memory in _BY_GROUP.items():
        if late := int(memory.late):
            return LateWords(memory.members[late % memory.ranks], name, late // memory.ranks)
    return None
