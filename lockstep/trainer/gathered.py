"""Models whose weights are sharded over ranks, for training or scoring: a micro-batch gathers the weights it needs."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .. import graph
from ..distributed import World
from ..distributed.mesh import ONE_RANK, Mesh
from ..models import Decoder, ResidentWeights, TensorRange, WeightSource, ranges_of
from ..models.checks import is_divisible
from .parameters import FlatParameters, FlatWeights, ShardedParameters


def make_trained_model(model: Decoder, mesh: Mesh) -> Decoder:
    """The decoder that this rank trains. Without tensor parallelism in either role it is `model`, which generates;
    otherwise a decoder whose parameters, except for a value head, have no memory. Buffers, such as router biases, are
    shared by both."""
    if mesh.tp.size == model.spread.axis.size == 1:
        return model
    made = _decoder_without_memory(model, mesh)
    if model.value_head is not None:
        made.add_value_head()
    for name, buffer in model.named_buffers():
        owner, _, last = name.rpartition(".")
        setattr(made.get_submodule(owner), last, buffer)
    return made


def allocate_parameters(model: Decoder, names: Collection[str]) -> None:
    """Give these parameters uninitialized memory of their own."""
    for name, parameter in model.named_parameters():
        if name in names:
            parameter.data = torch.empty_like(parameter, memory_format=torch.contiguous_format)


def _decoder_without_memory(model: Decoder, mesh: Mesh) -> Decoder:
    """A decoder like this one with a rank's parts on a mesh, whose parameters have no memory."""
    made = Decoder(model.config, model.embed.dtype, model.embed.device, Mesh(tp=mesh.tp), memory=False)
    made.masks = model.masks
    return made


class GatheredParameters(ShardedParameters):
    """`ShardedParameters` whose micro-batches all-gather the weights: ZeRO stage 3."""

    def inputs(self, model: Decoder) -> graph.Inputs:
        found, parts = super().inputs(model), self.gathering.param
        frozen = {name: tensor for name, tensor in found.param.items() if name not in parts}
        return replace(found, param={**parts, **frozen}, module=None)

    @contextmanager
    def micro_batch(
        self, inputs: graph.Inputs, maxima: Sequence[int], differentiated: bool = True
    ) -> Iterator[graph.Inputs]:
        """Like `reduce_statistics`, and with gathered weights."""
        parts = {n: part for n, part in inputs.param.items() if n in self.names}
        weights = {n: self.gather_parameter(n, part).requires_grad_(differentiated) for n, part in parts.items()}
        with _without_fusion(differentiated), self.reduce_statistics(inputs, maxima) as own:
            yield replace(own, module=None, param={**inputs.param, **weights})


class Reference:
    """A model that is only read, the reference or the teacher; this class is for one process and holds it whole."""

    def __init__(self, model: Decoder) -> None:
        self.model = model

    def inputs(self) -> graph.Inputs:
        """The inputs of a function of the model."""
        return graph.module_inputs(self.model)

    def micro_batch(self, inputs: graph.Inputs) -> AbstractContextManager[graph.Inputs]:
        """`inputs` with the weights for a micro-batch."""
        return nullcontext(inputs)

    def gather_by_layer(self) -> AbstractContextManager[None]:
        """A context in which the model can be called eagerly, with few weights in memory beyond this rank's part."""
        return nullcontext()

    @property
    def nbytes(self) -> int:
        """The bytes of the weights that this rank holds."""
        return sum(parameter.nbytes for parameter in self.model.parameters())

    def constants(self) -> dict[str, Any]:
        """What the model's graphs depend on."""
        return self.model.trace_constants()


class GatheredReference(Reference):
    """A `Reference` that is sharded over the ranks; a micro-batch gathers its weights.

    Args:
        model: a decoder of this model on this device, of which only configuration, dtype and masks are read.
        mesh: the trainer's mesh. Its tensor parallelism is used for this model too if it divides the model evenly.

    Attributes:
        weights: this rank's part, which the caller fills (`own_ranges`).
    """

    def __init__(self, model: Decoder, mesh: Mesh) -> None:
        if not is_divisible(model.config, mesh.tp.size):
            mesh = replace(mesh, tp=ONE_RANK.tp)
        made = _decoder_without_memory(model, mesh)
        super().__init__(made.requires_grad_(False))
        self.weights = FlatWeights(made, mesh, [name for name, _ in made.named_parameters()])

    def own_ranges(self) -> dict[str, list[TensorRange]]:
        """What this rank holds: its ranges of the parameters, and all buffers."""
        buffers = {name: held for name, held in ranges_of(self.model).items() if name not in self.weights.names}
        return {**self.weights.own_ranges(), **buffers}

    def inputs(self) -> graph.Inputs:
        return replace(
            super().inputs(), param=dict(zip(self.weights.names, self.weights.parts, strict=True)), module=None
        )

    @contextmanager
    def micro_batch(self, inputs: graph.Inputs) -> Iterator[graph.Inputs]:
        with _without_fusion(False):
            gathered = {name: self.weights.gather_parameter(name, part) for name, part in inputs.param.items()}
            yield replace(inputs, param=gathered)

    def gather_by_layer(self) -> AbstractContextManager[None]:
        return gather_by_layer(self.weights, self.model, differentiated=False)

    @property
    def nbytes(self) -> int:
        return self.weights.data.nbytes

    def constants(self) -> dict[str, Any]:
        layout = self.weights.layout
        shapes = dict(zip(self.weights.names, layout.shapes, strict=True))
        return {**super().constants(), "sharding": {"ranks": layout.ranks, "shapes": shapes}}


def make_reference(model: Decoder, world: World, source: WeightSource | None) -> Reference:
    """A model that is only read, sharded where there are several ranks, each of which calls this. `source`: where its
    weights come from; None: `model`, which must then be whole.

    Raises:
        InputError: the weights cannot be read.
    """
    if world.size == 1:
        return Reference(model)
    made = GatheredReference(model, world.mesh)
    world.run_on_all(lambda: (source or ResidentWeights(model)).fill(made.own_ranges()))
    return made


@contextmanager
def gather_by_layer(flat: FlatWeights, model: Decoder, differentiated: bool) -> Iterator[None]:
    """A context in which a model without weights has a layer's weights while that layer is called, and those outside of
    layers all the time. Autograd keeps the weights that a layer's backward pass needs."""
    call_layer, trained = model.call_layer, flat.parameters[0].requires_grad

    def call_with_weights(layer: torch.nn.Module, index: int, *arguments: Any) -> Tensor:
        with _gather_parameters(flat, [name.startswith(f"layers.{index}.") for name in flat.names]):
            return call_layer(layer, index, *arguments)

    outside_layers = [not name.startswith("layers.") for name in flat.names]
    with _without_fusion(differentiated), _gather_parameters(flat, outside_layers):
        model.call_layer = call_with_weights
        try:
            for parameter in flat.parameters:
                parameter.requires_grad_(differentiated)
            yield
        finally:
            model.call_layer = call_layer
            for parameter in flat.parameters:
                parameter.requires_grad_(trained)


@contextmanager
def _gather_parameters(flat: FlatWeights, chosen: Sequence[bool]) -> Iterator[None]:
    """A context in which the model's chosen parameters are gathered."""
    parameters = [item for item, wanted in zip(flat.parameters, chosen, strict=True) if wanted]
    kept = [parameter.data for parameter in parameters]
    try:
        for name, parameter, part, wanted in zip(flat.names, flat.parameters, flat.parts, chosen, strict=True):
            if wanted:
                parameter.data = flat.gather_parameter(name, part)
        yield
    finally:
        for parameter, data in zip(parameters, kept, strict=True):
            parameter.data = data


def _without_fusion(differentiated: bool) -> AbstractContextManager[Any]:
    """A context in which forward passes without gradients use separate operators, as those with gradients do. Fused
    products prefetch weights before the preceding kernel has finished, and here that may be the one gathering them."""
    return torch.set_grad_enabled(torch.is_grad_enabled() or not differentiated)


def flat_parameters(
    model: Decoder,
    mesh: Mesh,
    frozen: Collection[str] = (),
    reader: Decoder | None = None,
    stage: int | None = None,
    float32: bool = False,
) -> FlatParameters:
    """A model's parameters without the `frozen` ones, as they are trained on this mesh. `reader`: the model that
    generates with them, by default `model`. `stage`: of ZeRO, 2 or 3; by default 2 unless there is a `reader`.
    `float32`: with several ranks, keep each rank's part in float32, to be its optimizer's masters."""
    if not mesh.axes and reader is None:
        return FlatParameters(model, mesh, frozen)
    gathers = stage == 3 or reader is not None
    return (GatheredParameters if gathers else ShardedParameters)(model, mesh, frozen, reader, float32)
