"""State that is put back after a trial run, in as few bytes as its values take."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from .fingerprints import WORDS

PART = 1 << 26  # bytes on their way between a device and the host at one time


class Snapshot:
    """What tensors hold, to be put back; on the device where that fits twice over, on the host otherwise.

    Before the first update gradients and moments are 0, and float32 masters have the lower halves of their words 0, as
    they are made from bfloat16. So of what is 0 throughout, whole tensors or halves of their words, nothing is kept.

    Attributes:
        nbytes: that are kept.
    """

    @torch.no_grad()
    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._zero, self._kept = list[Tensor](), list[Tensor]()
        for part in (part for tensor in tensors for part in _parts(tensor.detach())):
            (self._kept if part.any() else self._zero).append(part)
        self.nbytes = sum(part.numel() * part.element_size() for part in self._kept)
        on_gpu = any(part.is_cuda for part in self._kept)
        on_host = on_gpu and torch.cuda.mem_get_info(self._kept[0].device)[0] <= 2 * self.nbytes
        self._copies = [_on_host(part) if on_host else part.clone() for part in self._kept]

    @torch.no_grad()
    def restore(self) -> None:
        for part in self._zero:
            part.zero_()
        for part, copy in zip(self._kept, self._copies, strict=True):
            copied(part, copy)


def _on_host(part: Tensor) -> Tensor:
    copy = torch.empty(part.shape, dtype=part.dtype)
    copied(copy, part)
    return copy


def copied(target: Tensor, source: Tensor) -> None:
    """Copy `source` to `target`; from one device to another a few rows at a time, as what does not lie in one piece is
    first laid out so, in memory that there may not be for all of it."""
    if target.device == source.device or source.dim() == 0:
        target.copy_(source)
        return
    rows = max(1, PART * len(source) // max(1, source.nbytes))
    for own, other in zip(target.split(rows), source.split(rows), strict=True):
        own.copy_(other)


def _parts(tensor: Tensor) -> list[Tensor]:
    """The bits of a tensor, as integers: together, or the halves of each word where one of them is 0 throughout."""
    words = tensor.view(WORDS[tensor.element_size()])
    if tensor.element_size() != 4 or not tensor.is_contiguous():
        return [words]
    halves = words.view(-1).view(torch.int16).view(-1, 2).unbind(1)
    return [words] if all(half.any() for half in halves) else list(halves)
