"""Copies of state to restore after a trial run, in as few bytes as its values take."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from .fingerprints import WORDS

PART = 1 << 26  # bytes that are tested for zeros, or copied between device and host, at once
ALIGNMENT = 16  # bytes
MAX_DEVICE_BYTES = 1 << 28  # bytes of copies on the device outside spare memory; further copies are on the host


class Snapshot:
    """The contents of tensors, copied part by part, to be restored.

    Before the first update gradients and moments are 0, and so are the lower 16 bits of float32 master weights, which
    were made from bfloat16. So nothing is kept of a part, or of either 16-bit half of its words, that is all zeros.

    Args:
        spare: contiguous, zeroed device memory to keep copies in; `restore` zeroes it again.

    Attributes:
        nbytes: bytes of the copies.
    """

    @torch.no_grad()
    def __init__(self, tensors: Iterable[Tensor], spare: Sequence[Tensor] = ()) -> None:
        self._zero, self._kept = list[Tensor](), list[tuple[Tensor, Tensor]]()
        here = 0  # bytes of copies on the device outside spare memory
        self._spare, self._taken = [memory.view(-1).view(torch.uint8) for memory in spare], list[Tensor]()
        self.nbytes = 0
        pieces = [piece for tensor in tensors for piece in _pieces(tensor.detach())]
        for part, used in (found for piece in pieces for found in _parts(piece)):
            if not used:
                self._zero.append(part)
                continue
            self.nbytes += part.nbytes
            copy = self._take_spare(part)
            if copy is None:
                here += part.nbytes
                device = torch.device("cpu") if here > MAX_DEVICE_BYTES else part.device
                copy = torch.empty(part.shape, dtype=part.dtype, device=device)
            copy_in_rows(copy, part)
            self._kept.append((part, copy))

    @torch.no_grad()
    def restore(self) -> None:
        for part in self._zero:
            part.zero_()
        for part, copy in self._kept:
            copy_in_rows(part, copy)
        for taken in self._taken:
            taken.zero_()

    def _take_spare(self, part: Tensor) -> Tensor | None:
        """Spare memory for a copy of `part`, or None if none is large enough."""
        size = part.nbytes
        for i, memory in enumerate(self._spare):
            if len(memory) >= size and memory.device == part.device:
                self._spare[i] = memory[-(-size // ALIGNMENT) * ALIGNMENT :]
                self._taken.append(memory[:size])
                return memory[:size].view(part.dtype).view(part.shape)
        return None


def copy_in_rows(target: Tensor, source: Tensor) -> None:
    """Copy `source` to `target`. Between devices, a few rows at a time: non-contiguous tensors are first copied to
    contiguous ones, for all of which there may be no memory."""
    if target.device == source.device or source.dim() == 0:
        target.copy_(source)
        return
    rows = max(1, PART * len(source) // max(1, source.nbytes))
    for own, other in zip(target.split(rows), source.split(rows), strict=True):
        own.copy_(other)


def _pieces(tensor: Tensor) -> Sequence[Tensor]:
    """A tensor in flat pieces of at most `PART` bytes; whole if it is not contiguous."""
    if not tensor.is_contiguous():
        return [tensor]
    return tensor.view(-1).split(max(1, PART // tensor.element_size()))


def _parts(tensor: Tensor) -> list[tuple[Tensor, bool]]:
    """The bits of a tensor as integers, with whether any is set: as a whole, or as the two 16-bit halves of each word
    if one half is zero throughout."""
    words = tensor.view(WORDS[tensor.element_size()])
    if tensor.element_size() != 4 or not tensor.is_contiguous():
        return [(words, bool(words.any()))]
    halves = words.view(-1).view(torch.int16).view(-1, 2).unbind(1)
    used = [bool(half.any()) for half in halves]
    return [(words, True)] if all(used) else list(zip(halves, used, strict=True))
