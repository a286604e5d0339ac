"""The decoder that is trained where ranks share its products, beside the whole one that generates."""

from __future__ import annotations

import torch

from ...distributed.mesh import Mesh
from ...models import Decoder


def in_trainer(model: Decoder, mesh: Mesh) -> Decoder:
    """This rank's part of a whole decoder, with its values; itself where nobody shares its products. Buffers, such as
    the biases of routers, are one in both."""
    if mesh.tp.size == 1:
        return model
    on_tp = Mesh(tp=mesh.tp)
    made = Decoder(model.config, model.embed.dtype, model.embed.device, on_tp)
    made.masks = model.masks
    if model.value_head is not None:
        made.add_value_head()
    values = dict(model.named_parameters())
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            parameter.copy_(made.placements[name].cut(values[name], on_tp))
    for name, buffer in model.named_buffers():
        owner, _, last = name.rpartition(".")
        setattr(made.get_submodule(owner), last, buffer)
    return made
