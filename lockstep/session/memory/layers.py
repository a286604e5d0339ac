"""What a layer keeps for its backward pass, found by calling it on tensors without memory: so for any family."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ... import ops
from ...models import Decoder, ModelConfig, PackedAttention

_TOKENS = 64


@cache
def decoder_of(config: ModelConfig, dtype: torch.dtype) -> Decoder:
    """A model without memory."""
    return Decoder(config, dtype, "meta")


@cache
def kept_by_layers(config: ModelConfig, dtype: torch.dtype) -> list[tuple[int, int]]:
    """Of each layer the bytes a token that its forward pass keeps; and those it keeps where it is computed again:
    what its modules are given and return."""
    decoder = decoder_of(config, dtype)
    known: dict[Any, tuple[int, int]] = {}
    found = []
    for index, layer in enumerate(decoder.layers):
        kind = type(layer), tuple((name, tuple(p.shape)) for name, p in layer.named_parameters())
        if kind not in known:
            known[kind] = _kept(decoder, index)
        found.append(known[kind])
    return found


def _kept(decoder: Decoder, index: int) -> tuple[int, int]:
    """Of one layer. On a GPU attention also keeps a float32 number a row and head."""
    seen, handles = _Crossings(), list[RemovableHandle]()
    layer = decoder.layers[index]
    routes: list[Any] | None = [] if decoder.config.moe_layers else None
    starts, start_S, length_S = (_empty(count, torch.int32) for count in (2, 1, 1))
    attend = PackedAttention(ops.Packed(starts, start_S, length_S, _TOKENS))
    rope = ops.rope_table(_empty(_TOKENS, torch.int64), decoder.inv_freq)
    x = _empty(_TOKENS, decoder.embed.dtype, decoder.config.hidden_size).requires_grad_()
    for module in layer.modules():
        handles += [module.register_forward_pre_hook(seen.enter), module.register_forward_hook(seen.leave)]
    try:
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(seen.save, lambda tensor: tensor):
            out = layer(index, x, rope, attend, routes)
    finally:
        for handle in handles:
            handle.remove()
    seen.save(out)
    outside = [*decoder.parameters(), *attend.packed[:3], rope, x]
    whole, again = seen.sizes({_place(tensor) for tensor in outside})
    return whole // _TOKENS + 4 * decoder.config.num_heads, again // _TOKENS


class _Crossings:
    """Tensors that a call keeps, and those that go in and out of modules, by where they lie."""

    def __init__(self) -> None:
        self._saved: dict[int, Tensor] = {}
        self._crossing: dict[int, Tensor] = {}

    def save(self, tensor: Tensor) -> Tensor:
        self._saved[_place(tensor)] = tensor
        return tensor

    def enter(self, _: nn.Module, arguments: Any) -> None:
        self._cross(arguments)

    def leave(self, _: nn.Module, __: Any, results: Any) -> None:
        self._cross(results)

    def _cross(self, values: Any) -> None:
        if isinstance(values, Tensor):
            self._crossing[_place(values)] = values
        for value in values if type(values) is tuple else ():  # what a router found is for others
            self._cross(value)

    def sizes(self, outside: set[int]) -> tuple[int, int]:
        """Bytes of what was saved and does not lie `outside`: of all, and of what crosses modules."""
        sizes = {at: x.untyped_storage().nbytes() for at, x in self._saved.items() if at not in outside}
        return sum(sizes.values()), sum(size for at, size in sizes.items() if at in self._crossing)


def _place(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _empty(count: int, dtype: torch.dtype, *more: int) -> Tensor:
    return torch.empty(count, *more, dtype=dtype, device="meta")
