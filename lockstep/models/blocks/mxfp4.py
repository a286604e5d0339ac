"""Weights in MXFP4 (OCP Microscaling Formats: 4 bits each, with a power-of-two scale for every 32), as bfloat16."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from ...cache.tensor_file import Entry, StoredTensor
from ...errors import InputError

METHOD = "mxfp4"  # what `quantization_config` calls it
BLOCKS, SCALES = "_blocks", "_scales"  # suffixes of the names of a tensor's two parts
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def dequantize(blocks: Tensor, scales: Tensor) -> Tensor:
    """The numbers of a tensor [..., N, G * 32], exact in bfloat16, transposed to rows by inputs, [..., G * 32, N].

    Args:
        blocks: uint8 [..., N, G, 16]; a byte holds two numbers, the first in its lower half: a sign and a magnitude.
        scales: uint8 [..., N, G]; the exponent of a power of two, plus 127. 255 stands for NaN.
    """
    values = torch.tensor((*_MAGNITUDES, *(-x for x in _MAGNITUDES)), dtype=torch.bfloat16)
    powers = torch.ldexp(torch.ones(256), torch.arange(-127, 129)).bfloat16()
    powers[255] = torch.nan
    halves = torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(-2)
    numbers = values.to(blocks.device)[halves.int()] * powers.to(blocks.device)[scales.int()].unsqueeze(-1)
    return numbers.flatten(-2).transpose(-1, -2)


class PartJoiner:
    """Joins the two parts of tensors, which may come from different files."""

    def __init__(self) -> None:
        self._first: dict[str, StoredTensor] = {}

    def join(self, part: str, stored: StoredTensor, where: str) -> tuple[str, StoredTensor] | None:
        """The whole tensor and its name once its second part is here; None at its first. Other tensors are returned as
        they are. `InputError`: the parts do not fit together; `where` names the file of this one."""
        if not part.endswith((BLOCKS, SCALES)):
            return part, stored
        name, other = part[: -len(BLOCKS)], SCALES if part.endswith(BLOCKS) else BLOCKS
        if (found := self._first.pop(name + other, None)) is None:
            self._first[part] = stored
            return None
        return name, _join_parts(f"{where}: {name}", *((stored, found) if other == SCALES else (found, stored)))


def _join_parts(name: str, blocks: StoredTensor, scales: StoredTensor) -> StoredTensor:
    """The tensor that its two parts make."""
    shape = blocks.entry.shape
    if shape != (*scales.entry.shape, 16) or {blocks.entry.dtype, scales.entry.dtype} != {torch.uint8}:
        both = f"{BLOCKS} {list(shape)} and {SCALES} {list(scales.entry.shape)}"
        raise InputError(f"{name} has {both}; they must be uint8 [..., N, G, 16] and [..., N, G]")
    *leading, outputs, groups, _ = shape
    return StoredTensor(Entry(torch.bfloat16, (*leading, groups * 32, outputs)), partial(_fill, blocks, scales))


def _fill(blocks: StoredTensor, scales: StoredTensor, first: int, values: Tensor, step: int = 0) -> None:
    """See `Fill`; supports whole columns of a matrix only. In both parts, these columns are rows."""
    *_, outputs, groups, _ = blocks.entry.shape
    assert step == outputs and len(values) == groups * 32
    matrix, column = divmod(first, len(values) * outputs)
    at, shape = (matrix * outputs + column) * groups, (values.shape[1], groups)
    block, scale = (values.new_empty(of, dtype=torch.uint8) for of in ((*shape, 16), shape))
    blocks.fill(at * 16, block.view(-1))
    scales.fill(at, scale.view(-1))
    values.copy_(dequantize(block, scale))
