"""The decoder that is trained where ranks share products, in either role, beside what a rank generates with."""

from __future__ import annotations

from collections.abc import Collection

import torch

from ...distributed.mesh import Mesh
from ...models import Decoder


def in_trainer(model: Decoder, mesh: Mesh) -> Decoder:
    """A decoder as this rank trains it, whose parameters have no memory, but for its value head; `model` itself, which
    generates, where nobody shares products. Buffers, such as the biases of routers, are one in both."""
    if mesh.tp.size == model.spread.axis.size == 1:
        return model
    made = Decoder(model.config, model.embed.dtype, model.embed.device, Mesh(tp=mesh.tp), memory=False)
    made.masks = model.masks
    if model.value_head is not None:
        made.add_value_head()
    for name, buffer in model.named_buffers():
        owner, _, last = name.rpartition(".")
        setattr(made.get_submodule(owner), last, buffer)
    return made


def give_memory(model: Decoder, names: Collection[str]) -> None:
    """Give these parameters memory of their own, to be filled."""
    for name, parameter in model.named_parameters():
        if name in names:
            parameter.data = torch.empty_like(parameter, memory_format=torch.contiguous_format)
