"""Weights that no rank trains with as a whole, or need not: a micro-batch gathers them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch

from ... import graph
from ...distributed.mesh import Mesh
from ...models import Decoder
from ..parameters import FlatParameters, ShardedParameters


class GatheredParameters(ShardedParameters):
    """`ShardedParameters` whose micro-batches gather the weights from all ranks' parts: ZeRO's stage 3."""

    def inputs(self, model: Decoder) -> graph.Inputs:
        found, parts = super().inputs(model), self.gathering.param
        frozen = {name: tensor for name, tensor in found.param.items() if name not in parts}
        return replace(found, param={**parts, **frozen}, module=None)

    @contextmanager
    def micro_batch(
        self, inputs: graph.Inputs, maxima: Sequence[int], differentiated: bool = True
    ) -> Iterator[graph.Inputs]:
        """With whole weights, too. Without gradients the separate operators compute: fused products read weights before
        the kernel before is complete, and here the weights are gathered in the same graph."""
        parts = {n: part for n, part in inputs.param.items() if n in self.names}
        weights = {n: self.gathered(n, part).requires_grad_(differentiated) for n, part in parts.items()}
        with torch.set_grad_enabled(torch.is_grad_enabled() or not differentiated), self.summed(inputs, maxima) as own:
            yield replace(own, module=None, param={**inputs.param, **weights})


def flat_parameters(
    model: Decoder, mesh: Mesh, frozen: Collection[str] = (), reader: Decoder | None = None, stage: int | None = None
) -> FlatParameters:
    """A model's parameters, but for those that are `frozen`, as they are trained on this mesh; `reader`, by default the
    model, generates with them. `stage`: ZeRO's, 2 or 3; by default 2 where the model's own are whole."""
    if not mesh.axes and reader is None:
        return FlatParameters(model, mesh, frozen)
    gathers = stage == 3 or reader is not None
    return (GatheredParameters if gathers else ShardedParameters)(model, mesh, frozen, reader)
