"""What a node computes, as plain data: the same for a graph that was just traced and for one that was loaded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from .sizes import Sizes


@dataclass(frozen=True)
class TensorValue:
    """A tensor. In `shape` open sizes are their names, or expressions in these names."""

    dtype: torch.dtype
    shape: tuple[int | str, ...]
    device: torch.device

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}[{', '.join(map(str, self.shape))}]"


# A tensor; a number computed from sizes, as text (an expression, or only its type); a tuple of values; or nothing.
Value: TypeAlias = TensorValue | str | tuple["Value", ...] | None


def value_of(found: Any, sizes: Sizes) -> Value:
    if isinstance(found, Tensor):
        return TensorValue(found.dtype, tuple(map(sizes.name, found.shape)), found.device)
    if isinstance(found, torch.SymInt):
        return f"int {sizes.name(found)}"
    if isinstance(found, (list, tuple)):
        return tuple(value_of(item, sizes) for item in found)
    return None if found is None else type(found).__name__


def tensors_in(value: Value) -> list[TensorValue]:
    items = value if isinstance(value, tuple) else (value,)
    return [item for item in items if isinstance(item, TensorValue)]
