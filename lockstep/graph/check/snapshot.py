"""State that is put back after a trial run, in as few bytes as its values take."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from .fingerprints import WORDS

SLICE = 1 << 26  # bytes that are looked at, and copied, at one time
MOST = 1 << 28  # bytes of copies on the device; what is beyond them is on the host


class Snapshot:
    """What tensors hold, to be put back, slice by slice.

    Before the first update gradients and moments are 0, and float32 masters have the lower halves of their words 0, as
    they are made from bfloat16. So of what is 0 throughout a slice, whole words or halves of them, nothing is kept.

    Attributes:
        nbytes: that are kept.
    """

    @torch.no_grad()
    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._zero, self._kept = list[Tensor](), list[tuple[Tensor, Tensor]]()
        self.nbytes = 0
        for part in (part for tensor in tensors for piece in _slices(tensor.detach()) for part in _parts(piece)):
            if not part.any():
                self._zero.append(part)
                continue
            self.nbytes += part.numel() * part.element_size()
            self._kept.append((part, part.to("cpu", copy=True) if self.nbytes > MOST else part.clone()))

    @torch.no_grad()
    def restore(self) -> None:
        for part in self._zero:
            part.zero_()
        for part, copy in self._kept:
            part.copy_(copy)


def _slices(tensor: Tensor) -> Iterator[Tensor]:
    """Parts of a tensor, one after another; all of one that is not contiguous."""
    if not tensor.is_contiguous():
        yield tensor
        return
    yield from tensor.view(-1).split(max(1, SLICE // tensor.element_size()))


def _parts(tensor: Tensor) -> list[Tensor]:
    """The bits of a tensor, as integers: together, or the halves of each word where one of them is 0 throughout."""
    words = tensor.view(WORDS[tensor.element_size()])
    if tensor.element_size() != 4 or not tensor.is_contiguous():
        return [words]
    halves = words.view(-1).view(torch.int16).view(-1, 2).unbind(1)
    return [words] if all(half.any() for half in halves) else list(halves)
