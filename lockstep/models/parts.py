"""What a rank has of a model: ranges of its tensors, and its part of one that several share."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..distributed.mesh import Mesh
from ..distributed.placement import ROWS, Placement
from .decoder import Decoder


class Held(NamedTuple):
    """What one process has of a tensor: flat elements, of which the first is element `first` of the whole."""

    values: Tensor
    first: int


Ranges = Mapping[str, Sequence[Held]]  # by the decoder's names, in ascending order


def whole(model: Decoder) -> dict[str, list[Held]]:
    """All of a model."""
    tensors = {name: p.detach() for name, p in model.named_parameters()} | dict(model.named_buffers())
    return {name: [Held(tensor.flatten(), 0)] for name, tensor in tensors.items()}


def within(held: Sequence[Held], start: int, count: int) -> Iterator[tuple[int, Tensor]]:
    """What is held of so many elements from `start` on: where it begins among them, and its values."""
    for i in range(max(0, bisect_right(held, start, key=lambda one: one.first) - 1), len(held)):
        values, first = held[i]
        begin, end = max(first, start), min(first + values.numel(), start + count)
        if first >= start + count:
            break
        if begin < end:
            yield begin - start, values[begin - first : end - first]


class ModelPart:
    """This rank's part of a decoder that is whole on this rank, to generate with.

    Rows of one product are views of the whole's; what lies in several pieces is copied. The head is cut by rows, tied
    or not, and a value head is left out.

    Args:
        mesh: what cuts it.

    Attributes:
        model: a decoder of the parts.
    """

    def __init__(self, source: Decoder, mesh: Mesh) -> None:
        self._mesh = mesh
        self._copies: list[tuple[Tensor, Tensor, Placement]] = []  # own, whole, and how it lies
        self.model = model = Decoder(source.config, source.embed.dtype, "meta", mesh)
        for part, (path, whole) in zip(model.modules(), source.named_modules(), strict=True):
            for name, parameter in whole.named_parameters(path, recurse=False):
                if name in model.placements:
                    setattr(part, name.rpartition(".")[2], self._own(parameter, model.placements[name]))
            for name, buffer in whole.named_buffers(recurse=False):
                setattr(part, name, buffer)
        model.lm_head, model.placements["lm_head"] = self._own(source.lm_head, ROWS), ROWS
        model.spread.index = torch.tensor([mesh.tp.rank], device=source.embed.device)
        model.inv_freq, model.local_inv_freq, model.masks = source.inv_freq, source.local_inv_freq, source.masks

    def _own(self, whole: Tensor, on: Placement) -> nn.Parameter:
        whole = whole.detach()
        own = on.cut(whole, self._mesh).contiguous()
        if own.untyped_storage().data_ptr() != whole.untyped_storage().data_ptr():
            self._copies.append((own, whole, on))
        return nn.Parameter(own, requires_grad=False)

    def update(self) -> None:
        """Copy what is copied anew, after the whole has changed in place."""
        for own, whole, on in self._copies:
            own.copy_(on.cut(whole, self._mesh))
