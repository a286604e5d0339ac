"""Where a model's parameters lie in flat buffers, in one process and sharded over several."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from math import prod

import torch
from torch import Tensor

from ...ops import SQUARES_BLOCK

ALIGNMENT = SQUARES_BLOCK  # elements: whole blocks of the gradient's norm, and well aligned for vector loads


@dataclass(frozen=True)
class Layout:
    """The flat buffer of each of `ranks` ranks: part after part, one a parameter, in order.

    A parameter, flat and padded with zeros at its end, is cut into equal parts of whole `ALIGNMENT`s, the first to rank
    0. All ranks' buffers are laid out alike, so nothing that is computed from the layout depends on the rank.

    Attributes:
        sizes, offsets: elements of each part, and where it begins; the last offset is the buffer's size.
    """

    shapes: tuple[tuple[int, ...], ...]
    ranks: int
    sizes: tuple[int, ...]
    offsets: tuple[int, ...]

    @staticmethod
    def of(shapes: Sequence[Sequence[int]], ranks: int = 1) -> Layout:
        """The layout of parameters of these shapes."""
        sizes = tuple(-(-prod(shape) // (ALIGNMENT * ranks)) * ALIGNMENT for shape in shapes)
        return Layout(tuple(map(tuple, shapes)), ranks, sizes, (0, *accumulate(sizes)))

    @property
    def size(self) -> int:
        """Elements of a buffer."""
        return self.offsets[-1]

    @cached_property
    def one_rank(self) -> Layout:
        """The layout of the same parameters in one process."""
        return Layout.of(self.shapes)

    def views(self, flat: Tensor) -> list[Tensor]:
        """The parts of a buffer: of a parameter's shape in one process, flat otherwise."""
        spans = list(zip(self.shapes, self.sizes, self.offsets, strict=False))
        if self.ranks == 1:
            return [flat[at : at + prod(shape)].view(shape) for shape, _, at in spans]
        return [flat[at : at + size] for _, size, at in spans]

    def cut(self, whole: Tensor, rank: int) -> Tensor:
        """The buffer of a rank, from that of a single process."""
        buffer = whole.new_zeros(self.size)
        for size, at, wide, begin in self._spans():
            part = whole[begin : begin + wide][rank * size :][:size]
            buffer[at : at + part.numel()] = part
        return buffer

    def norm_order(self) -> Tensor:
        """Where each block of a single process's buffer stands among the blocks of all ranks' buffers, int64."""
        blocks = self.size // ALIGNMENT
        order = []
        for size, at, wide, _ in self._spans():
            block = torch.arange(wide // ALIGNMENT)
            per_rank = size // ALIGNMENT
            order.append(block // per_rank * blocks + at // ALIGNMENT + block % per_rank)
        return torch.cat(order)

    def _spans(self) -> list[tuple[int, int, int, int]]:
        """For each parameter the size and offset of its part, here and in a single process."""
        one = self.one_rank
        return list(zip(self.sizes, self.offsets, one.sizes, one.offsets, strict=False))
