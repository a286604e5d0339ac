"""Weights of 4 bits with a power of two for every 32 (OCP Microscaling Formats, MXFP4), as bfloat16."""

from __future__ import annotations

import torch
from torch import Tensor

METHOD = "mxfp4"  # what `quantization_config` calls it
BLOCKS, SCALES = "_blocks", "_scales"  # ends of the names of a tensor's two parts
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def dequantized(blocks: Tensor, scales: Tensor) -> Tensor:
    """The numbers of a tensor [..., N, G * 32], bfloat16 and exact, by inputs: [..., G * 32, N].

    Args:
        blocks: uint8 [..., N, G, 16]; a byte holds two numbers, the first in its lower half: a sign and a magnitude.
        scales: uint8 [..., N, G]; a power of two, plus 127.
    """
    values = torch.tensor((*_MAGNITUDES, *(-x for x in _MAGNITUDES)), dtype=torch.bfloat16)
    halves = torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(-2)
    numbers = torch.ldexp(values[halves.int()], scales.int().unsqueeze(-1) - 127)
    return numbers.flatten(-2).transpose(-1, -2)


class Pairs:
    """Tensors whose two parts come one after the other, perhaps from different files."""

    def __init__(self) -> None:
        self._first: dict[str, Tensor] = {}

    def whole(self, part: str, tensor: Tensor) -> tuple[str, Tensor] | None:
        """Name and numbers of the tensor, with its second part; None after its first. Others are what they are."""
        if not part.endswith((BLOCKS, SCALES)):
            return part, tensor
        name, other = part[: -len(BLOCKS)], SCALES if part.endswith(BLOCKS) else BLOCKS
        if (found := self._first.pop(name + other, None)) is None:
            self._first[part] = tensor
            return None
        return name, dequantized(*((tensor, found) if other == SCALES else (found, tensor)))
