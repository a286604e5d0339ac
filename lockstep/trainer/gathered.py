"""Models of which several ranks have parts, to be trained or read: a micro-batch gathers the weights that it needs."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .. import graph
from ..distributed import World
from ..distributed.mesh import ALONE, Mesh
from ..models import Decoder, Held, ResidentWeights, WeightSource, ranges_of
from ..models.checks import divides
from .parameters import FlatParameters, FlatWeights, ShardedParameters


def in_trainer(model: Decoder, mesh: Mesh) -> Decoder:
    """A decoder as this rank trains it, whose parameters have no memory, but for its value head; `model` itself, which
    generates, where nobody shares products. Buffers, such as the biases of routers, are one in both."""
    if mesh.tp.size == model.spread.axis.size == 1:
        return model
    made = _without_memory(model, mesh)
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


def _without_memory(model: Decoder, mesh: Mesh) -> Decoder:
    """A decoder like this one, as a rank of a mesh has it, whose parameters have no memory."""
    made = Decoder(model.config, model.embed.dtype, model.embed.device, Mesh(tp=mesh.tp), memory=False)
    made.masks = model.masks
    return made


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
        """With whole weights, too."""
        parts = {n: part for n, part in inputs.param.items() if n in self.names}
        weights = {n: self.gathered(n, part).requires_grad_(differentiated) for n, part in parts.items()}
        with _separate(differentiated), self.summed(inputs, maxima) as own:
            yield replace(own, module=None, param={**inputs.param, **weights})


class Reference:
    """A model that is only read, the reference or the teacher; this class: whole, as in one process."""

    def __init__(self, model: Decoder) -> None:
        self.model = model

    def inputs(self) -> graph.Inputs:
        """What a function of the model is bound to."""
        return graph.module_inputs(self.model)

    def micro_batch(self, inputs: graph.Inputs) -> AbstractContextManager[graph.Inputs]:
        """`inputs` with the weights to score a micro-batch with."""
        return nullcontext(inputs)

    def by_layer(self) -> AbstractContextManager[None]:
        """Within it the model can be called as it is, with few weights beyond what this rank has."""
        return nullcontext()

    @property
    def nbytes(self) -> int:
        """Of the weights that this rank has."""
        return sum(parameter.nbytes for parameter in self.model.parameters())

    def constants(self) -> dict[str, Any]:
        """What its graphs depend on."""
        return self.model.baked()


class GatheredReference(Reference):
    """A `Reference` of which each rank has a part, which a micro-batch gathers.

    Args:
        model: any decoder of it on this device, of which only configuration, dtype and masks are read.
        mesh: of the trainer. Ranks that share its products share those of this model, if they can do so evenly.

    Attributes:
        weights: this rank's part, to be filled (`own`).
    """

    def __init__(self, model: Decoder, mesh: Mesh) -> None:
        if not divides(model.config, mesh.tp.size):
            mesh = replace(mesh, tp=ALONE.tp)
        made = _without_memory(model, mesh)
        super().__init__(made.requires_grad_(False))
        self.weights = FlatWeights(made, mesh, [name for name, _ in made.named_parameters()])

    def own(self) -> dict[str, list[Held]]:
        """What this rank has of it: ranges of the parameters, and all buffers."""
        buffers = {name: held for name, held in ranges_of(self.model).items() if name not in self.weights.names}
        return {**self.weights.own(), **buffers}

    def inputs(self) -> graph.Inputs:
        return replace(
            super().inputs(), param=dict(zip(self.weights.names, self.weights.parts, strict=True)), module=None
        )

    @contextmanager
    def micro_batch(self, inputs: graph.Inputs) -> Iterator[graph.Inputs]:
        with _separate(False):
            gathered = {name: self.weights.gathered(name, part) for name, part in inputs.param.items()}
            yield replace(inputs, param=gathered)

    def by_layer(self) -> AbstractContextManager[None]:
        return gathered_by_layer(self.weights, self.model, differentiated=False)

    @property
    def nbytes(self) -> int:
        return self.weights.data.nbytes

    def constants(self) -> dict[str, Any]:
        layout = self.weights.layout
        shapes = dict(zip(self.weights.names, layout.shapes, strict=True))
        return {**super().constants(), "sharding": {"ranks": layout.ranks, "shapes": shapes}}


def reference_of(model: Decoder, world: World, source: WeightSource | None = None) -> Reference:
    """A model that is only read, as ranks have it; every rank calls it. `source`: where its weights come from; by
    default `model`, which is whole.

    Raises:
        InputError: they cannot be read.
    """
    if world.size == 1:
        return Reference(model)
    made = GatheredReference(model, world.mesh)
    world.each(lambda: (source or ResidentWeights(model)).fill(made.own()))
    return made


@contextmanager
def gathered_by_layer(flat: FlatWeights, model: Decoder, differentiated: bool) -> Iterator[None]:
    """Within it a model that has no weights has those of a layer while the layer is called, and what is in no layer all
    the time. What a layer keeps for its backward pass keeps what it needs of them."""
    call, of_layers = model.call_layer, [name.startswith("layers.") for name in flat.names]
    trained = flat.parameters[0].requires_grad

    def called(layer: torch.nn.Module, index: int, *arguments: Any) -> Tensor:
        with _filled(flat, [name.startswith(f"layers.{index}.") for name in flat.names]):
            return call(layer, index, *arguments)

    with _separate(differentiated), _filled(flat, [not inside for inside in of_layers]):
        model.call_layer = called
        try:
            for parameter in flat.parameters:
                parameter.requires_grad_(differentiated)
            yield
        finally:
            model.call_layer = call
            for parameter in flat.parameters:
                parameter.requires_grad_(trained)


@contextmanager
def _filled(flat: FlatWeights, chosen: Sequence[bool]) -> Iterator[None]:
    """Within it the model's chosen parameters are whole."""
    parameters = [item for item, wanted in zip(flat.parameters, chosen, strict=True) if wanted]
    kept = [parameter.data for parameter in parameters]
    try:
        for name, parameter, part, wanted in zip(flat.names, flat.parameters, flat.parts, chosen, strict=True):
            if wanted:
                parameter.data = flat.gathered(name, part)
        yield
    finally:
        for parameter, data in zip(parameters, kept, strict=True):
            parameter.data = data


def _separate(differentiated: bool) -> AbstractContextManager[Any]:
    """Within it what is computed without gradients is computed by separate operators: fused products read weights
    before the kernel before is complete, and here weights are gathered in the same graph."""
    return torch.set_grad_enabled(torch.is_grad_enabled() or not differentiated)


def flat_parameters(
    model: Decoder,
    mesh: Mesh,
    frozen: Collection[str] = (),
    reader: Decoder | None = None,
    stage: int | None = None,
    float32: bool = False,
) -> FlatParameters:
    """A model's parameters, but for those that are `frozen`, as they are trained on this mesh; `reader`, by default the
    model, generates with them. `stage`: ZeRO's, 2 or 3; by default 2 where the model's own are whole. `float32`: of
    several ranks each keeps its part in that, to be its optimizer's masters."""
    if not mesh.axes and reader is None:
        return FlatParameters(model, mesh, frozen)
    gathers = stage == 3 or reader is not None
    return (GatheredParameters if gathers else ShardedParameters)(model, mesh, frozen, reader, float32)
