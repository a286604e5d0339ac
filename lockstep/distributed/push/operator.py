"""The operator, and its fallback by collectives."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import torch_private


@torch.library.custom_op("lockstep::push_columns", mutates_args=(), device_types="cpu")
def push_columns(x: Tensor, ranks: int, group: str, to_owners: bool) -> Tensor:
    """All ranks' columns side by side, in rank order: of all rows, or of this rank's share of the rows. Nothing is
    computed.

    Args:
        x: this rank's columns, [R, W].
        group: the name of the ranks' group in graphs (`Axis.group`).
        to_owners: whether to return this rank's share of the rows alone; `ranks` must divide R.

    Returns:
        [R, ranks * W], or [R / ranks, ranks * W] with `to_owners`.
    """
    return by_collective(x, ranks, group, to_owners)


@push_columns.register_kernel("cuda")
def _push_columns_cuda(x: Tensor, ranks: int, group: str, to_owners: bool) -> Tensor:
    from . import triton  # not required on machines without a GPU

    return triton.push_columns(x, ranks, group, to_owners)


@push_columns.register_fake
def _push_columns_fake(x: Tensor, ranks: int, group: str, to_owners: bool) -> Tensor:
    rows, width = x.shape
    return x.new_empty(rows // ranks if to_owners else rows, ranks * width)


def by_collective(x: Tensor, ranks: int, group: str, to_owners: bool) -> Tensor:
    """`push_columns` by an all-gather or an all-to-all."""
    rows, width = x.shape
    if to_owners:
        found = torch_private.all_to_all(x.reshape(-1), ranks, group)
    else:
        found = torch_private.all_gather(x.contiguous(), ranks, group)
    parts = torch_private.wait(found).view(ranks, -1, width)
    return torch.cat(parts.unbind(), dim=1)
