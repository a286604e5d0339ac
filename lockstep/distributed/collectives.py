"""The collectives along an axis of the mesh, for eager calls and for traces alike.

A captured graph names the axis's group and holds nothing else of a rank: it is the same graph on all of them. Each
collective is two calls, its start and the wait for it, which passes move apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from torch import Tensor
from torch.nn import functional

from . import torch_private
from .mesh import Axis


def gather(x: Tensor, axis: Axis) -> Tensor:
    """Every rank's `x`, [ranks, *x.shape], by rank; the same everywhere."""
    return torch_private.wait(torch_private.all_gather(x.reshape(1, *x.shape), axis.size, axis.group))


def unshard(shard: Tensor, shape: Sequence[int], axis: Axis) -> Tensor:
    """The whole tensor whose parts, one a rank, are `shard`: flat, of equal size, the last ones padded at the end."""
    whole = torch_private.wait(torch_private.all_gather(shard, axis.size, axis.group))
    size = prod(shape)
    return (whole if size == whole.numel() else whole[:size]).view(shape)


def exchange(x: Tensor, size: int, axis: Axis) -> Tensor:
    """Each rank's part `rank` of a tensor that all ranks have values of, [ranks, size], by the rank it comes from.

    Adding the rows up in their order is a reduce-scatter whose order of addition is fixed: whatever the number of
    ranks, the sum is that of one process which adds the same tensors one after another. It moves as many bytes, in the
    tensor's own dtype, and may add in a wider one.

    Args:
        size: of a part; `ranks` parts hold the tensor and padding.
    """
    flat = x.reshape(-1)
    if flat.numel() < size * axis.size:
        flat = functional.pad(flat, (0, size * axis.size - flat.numel()))
    return torch_private.wait(torch_private.all_to_all(flat, axis.size, axis.group)).view(axis.size, size)
