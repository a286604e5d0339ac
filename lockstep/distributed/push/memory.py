"""The memory that the ranks of a group store into."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ...ops.records import PARITIES, SLOT, Peers
from .. import torch_private

WORD_BYTES = 8  # a word and its mark


@dataclass(frozen=True)
class SharedMemory:
    """What a rank needs to store words into the memory of its group's ranks, and to see that theirs have arrived.

    Attributes:
        rank, ranks: this rank's place in the group, and the group's size.
        patience: nanoseconds that a launch waits for the words of other ranks.
        addresses: int64 [ranks + 1]: addresses of each rank's slots, int64 [PARITIES, ranks, SLOT] with the sender's
            rank in the middle, and the address of `late`.
        state: int64 [2]: launches so far, and the finished programs of the current launch.
        late: in host memory, written by the device: 0, or launch * ranks + sender for words that did not come in time.
        keep_alive: holds the memory that `addresses` points into.
        members: the global ranks of the group.
    """

    rank: int
    ranks: int
    patience: int
    addresses: Tensor
    state: Tensor
    late: Tensor
    keep_alive: object = None
    members: tuple[int, ...] = ()

    @property
    def peers(self) -> Peers:
        """Where the kernel of a product stores its words."""
        return Peers(self.addresses, self.state, self.rank, self.ranks)


class LateWords(NamedTuple):
    """Words that did not come in time: the sender's global rank, the group's name, and the number of its launch."""

    rank: int
    group: str
    launch: int


_BY_GROUP: dict[str, SharedMemory] = {}


def allocate_slots(ranks: int, device: torch.device) -> Tensor:
    """This rank's slots, allocated so that `share_memory` can share them with the group."""
    return torch_private.symmetric_bytes(WORD_BYTES * PARITIES * ranks * SLOT, device)


def share_memory(name: str, group: dist.ProcessGroup, own: Tensor, timeout: float) -> SharedMemory:
    """Share the slots of a group's ranks and register them under the group's name. Collective; the memory may be used
    once it has returned on all ranks.

    Args:
        timeout: seconds that a launch waits for the words of other ranks.

    Raises:
        RuntimeError: the GPUs of the group cannot reach one another's memory.
    """
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    (slots, mapped), device = torch_private.symmetric_memory(own, group), own.device
    late = torch.zeros(1, dtype=torch.int64, pin_memory=True)
    addresses = torch.tensor([*slots, late.data_ptr()], device=device)
    state = torch.zeros(2, dtype=torch.int64, device=device)
    own.zero_()  # launches count from 1, so no launch has this mark
    torch.cuda.synchronize(device)
    members = tuple(dist.get_process_group_ranks(group))
    _BY_GROUP[name] = SharedMemory(rank, ranks, int(timeout * 1e9), addresses, state, late, (own, mapped), members)
    return _BY_GROUP[name]


def shared_memory(group: str) -> SharedMemory:
    """What `share_memory` registered for a group, by its name in graphs."""
    return _BY_GROUP[group]


def forget_memory(group: str) -> None:
    """Undo `share_memory`, if it was called."""
    _BY_GROUP.pop(group, None)


def late_words() -> LateWords | None:
    """Words that did not come to this process in time, if any: the cause of the device errors that follow."""
    for name, memory in _BY_GROUP.items():
        if late := int(memory.late):
            return LateWords(memory.members[late % memory.ranks], name, late // memory.ranks)
    return None
