"""A model's weights and gradients as flat buffers: whole in one process, sharded over several ranks.

Sums over ranks are accumulated in rank order, so that they equal the sums of one process that runs the same
micro-batches one after another.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate as running_totals
from itertools import pairwise
from math import prod
from typing import Protocol

import torch
from torch import Tensor

from .. import distributed, graph, ops
from ..distributed.cells import Cells
from ..distributed.collectives import all_reduce_max, all_reduce_sum
from ..distributed.mesh import ONE_RANK, Axis, Mesh
from ..distributed.parameter_parts import Shares, gather_whole, take_part_at, whole_shape
from ..distributed.placement import WHOLE
from ..models import Decoder, TensorRange
from ..ops import SQUARES_BLOCK

_PIECE = 1 << 24  # elements of the weights that are copied, rounded or compared at a time
ALIGNMENT = SQUARES_BLOCK  # elements: whole blocks of the gradient norm, and aligned for vector loads


@dataclass(frozen=True)
class Layout:
    """The layout of the flat buffer on each of `ranks` ranks: a part of every parameter, in order.

    A parameter is flattened, padded with zeros, and cut into equal parts that are multiples of `ALIGNMENT`, in rank
    order. The layout is the same on all ranks, so nothing that is computed from it depends on the rank.

    Attributes:
        sizes, offsets: the number of elements and the offset of each part; the last offset is the buffer's size.
    """

    shapes: tuple[tuple[int, ...], ...]
    ranks: int
    sizes: tuple[int, ...]
    offsets: tuple[int, ...]

    @staticmethod
    def of(shapes: Sequence[Sequence[int]], ranks: int = 1) -> Layout:
        sizes = tuple(-(-prod(shape) // (ALIGNMENT * ranks)) * ALIGNMENT for shape in shapes)
        return Layout(tuple(map(tuple, shapes)), ranks, sizes, (0, *running_totals(sizes)))

    @property
    def size(self) -> int:
        return self.offsets[-1]

    @cached_property
    def one_rank(self) -> Layout:
        return Layout.of(self.shapes)

    def views(self, flat: Tensor) -> list[Tensor]:
        """The parts of an unsharded buffer, in their parameters' shapes."""
        return [flat[at : at + prod(s)].view(s) for s, at in zip(self.shapes, self.offsets, strict=False)]

    def flat_views(self, flat: Tensor) -> list[Tensor]:
        """The parts of a buffer, flat and with their padding."""
        return [flat[at : at + size] for size, at in zip(self.sizes, self.offsets, strict=False)]


class Buffer(Protocol):
    """A flat tensor, in memory or in a file, that is read in slices."""

    @property
    def shape(self) -> Sequence[int]: ...

    def __getitem__(self, part: slice) -> Tensor: ...


class FlatWeights:
    """Some of a model's parameters in one buffer, each sharded over the ranks of the mesh's `fsdp`.

    Args:
        model: the model on this mesh, with this rank's tensor-parallel parts.
        names: the model's names of the parameters; a tied parameter appears once.
        float32: make the buffer float32 instead of the parameters' dtype.

    Attributes:
        names, parameters: as given, in buffer order. dtype: the parameters'.
        layout: of the buffer. whole_layout: of the buffer that one process would have.
        data: [layout.size], of `dtype` or float32; the padding stays zero.
        parts: views of `data`, one for each parameter: in its shape in one process, else flat with padding.
    """

    def __init__(self, model: Decoder, mesh: Mesh, names: Sequence[str], float32: bool = False) -> None:
        self.names, self.parameters = list(names), [model.get_parameter(name) for name in names]
        first = self.parameters[0]
        self.dtype = first.dtype
        assert all(p.dtype == first.dtype and p.device == first.device for p in self.parameters)
        self.mesh, self.placements = mesh, [model.placements[name] for name in names]
        self.layout = Layout.of([p.shape for p in self.parameters], mesh.fsdp.size)
        placed = zip(self.placements, self.layout.shapes, strict=True)
        self.whole_layout = Layout.of([whole_shape(on, mesh, shape) for on, shape in placed])
        dtype = torch.float32 if float32 else first.dtype
        self.data = torch.zeros(self.layout.size, dtype=dtype, device=first.device)
        self.parts = self._views(self.data)

    def _views(self, flat: Tensor) -> list[Tensor]:
        return self.layout.flat_views(flat)

    @torch.no_grad()
    def gather_parameter(self, name: str, part: Tensor) -> Tensor:
        """A parameter in the model's shape and dtype, all-gathered along `fsdp`. The parts are rounded before that."""
        with _attributed_to(name):
            return distributed.unshard(part.to(self.dtype), self.layout.shapes[self.names.index(name)], self.mesh.fsdp)

    def own_ranges(self) -> dict[str, list[TensorRange]]:
        """This rank's ranges of the whole parameters; views of `data`."""
        found = dict[str, list[TensorRange]]()
        for i, (name, part) in enumerate(zip(self.names, self.parts, strict=True)):
            flat, pieces = part.flatten(), self._shares(i).pieces_of(self.rank)
            found[name] = [TensorRange(flat[at : at + count], there) for at, there, count in pieces]
        return found

    def round_to_dtype(self) -> None:
        """Round a float32 buffer, which was filled from weights of any dtype, to the parameters' dtype."""
        for piece in self.data.split(_PIECE):
            piece.copy_(piece.to(self.dtype))

    def _shares(self, index: int) -> Shares:
        shape, size = self.whole_layout.shapes[index], self.layout.sizes[index]
        return Shares(self.placements[index], shape, self.mesh.tp.size, size)

    @property
    def rank(self) -> int:
        """This rank in the world."""
        return self.mesh.fsdp.rank * self.mesh.tp.size + self.mesh.tp.rank


class FlatParameters(FlatWeights):
    """A buffer for a model's trained weights and a float32 buffer for their gradients; this class is for one process.

    The model's trained parameters become views of the buffer, matrices first, then vectors. Frozen parameters stay as
    they are, on every rank.

    Args:
        frozen: names of parameters that are not trained.

    Attributes:
        reads_own: whether the model's own parameters are the trained weights, whole.
        has_separate_shard: whether they are, and `data` is memory of its own beside them.
        grad: [layout.size], float32; the padding stays zero.
        grads: views of `grad`, as `parts` are of `data`.
        num_matrix_elements: the offset at which the vectors begin.
        counted: {"counted": bool, which blocks of `grad` this rank counts in the norm}; empty: all of them.
        replicated: the [begin, end) ranges of `grad` of parameters that all ranks of `tp` have. Each rank accumulates
            its own gradients there until an update sums them over the ranks (`sum_replicated`).
        cell: ranks per cell where a round consists of whole cells (`Cells.cell_size_in_round`), else 0.
        cells: where cells span several rounds, the sum of the finished ones; `grad` then has that of the current one.
    """

    reads_own = True
    has_separate_shard = False
    replicated: Sequence[tuple[int, int]] = ()
    cell: int = 0
    cells: Tensor | None = None

    def __init__(
        self, model: Decoder, mesh: Mesh = ONE_RANK, frozen: Collection[str] = (), float32: bool = False
    ) -> None:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name not in frozen)
        trained = [item for item in model.named_parameters() if item[0] not in frozen]
        names = [name for name, _ in sorted(trained, key=lambda item: item[1].dim() < 2)]
        super().__init__(model, mesh, names, float32)
        self.counted: dict[str, Tensor] = {}
        self.num_matrix_elements = self.layout.offsets[sum(p.dim() >= 2 for p in self.parameters)]
        self.grad = torch.zeros(self.layout.size, dtype=torch.float32, device=self.data.device)
        self.grads = self._views(self.grad)
        self._bind_parameters()

    def _views(self, flat: Tensor) -> list[Tensor]:
        return self.layout.views(flat)

    def _bind_parameters(self) -> None:
        for parameter, part in zip(self.parameters, self.parts, strict=True):
            part.copy_(parameter.data)
            parameter.data = part

    def copy_from_model(self) -> None:
        """Refresh `data` from the model's own parameters; in one process they are views of it already."""

    def equals_model(self) -> bool:
        """Whether `data` has memory of its own and `copy_from_model` would not change it."""
        return False

    def inputs(self, model: Decoder) -> graph.Inputs:
        """The inputs of a function of the model: its weights as they are trained, and its other tensors."""
        return graph.module_inputs(model)

    def micro_batch(
        self, inputs: graph.Inputs, maxima: Sequence[int], differentiated: bool = True
    ) -> AbstractContextManager[graph.Inputs]:
        """`reduce_statistics`, with the weights for a micro-batch. `differentiated`: whether they get gradients."""
        return self.reduce_statistics(inputs, maxima)

    def reduce_statistics(self, inputs: graph.Inputs, maxima: Sequence[int]) -> AbstractContextManager[graph.Inputs]:
        """`inputs` with statistics for this rank's micro-batch, which on exit are reduced over all ranks and added;
        `maxima` are the indices of those that are maxima instead of sums."""
        return nullcontext(inputs)

    def accumulate(self, totals: Sequence[Tensor], grads: Sequence[Tensor], names: Sequence[str] | None = None) -> None:
        """Add each gradient to its total, in the total's precision. `names`: of the parameters, by default all."""
        for total, grad in zip(totals, grads, strict=True):
            total.add_(grad)

    def set_cells(self, cells: Cells) -> None:
        self.cell = cells.cell_size_in_round
        self.cells = torch.zeros_like(self.grad) if cells.span_rounds else None

    def end_cell(self, inputs: graph.Inputs) -> dict[str, Tensor]:
        """End a cell: add its sum to that of the cells before it, and start the next one from 0."""
        grad = inputs.grad["grad"]
        inputs.buffer["cells"].add_(grad)
        grad.zero_()
        return {}

    def end_cells(self, inputs: graph.Inputs) -> dict[str, Tensor]:
        """End an update's last cell, and leave the total in `grad`, where the update reads it."""
        cells = inputs.buffer["cells"]
        inputs.grad["grad"].add_(cells)  # the addition of two numbers commutes
        cells.zero_()
        return {}

    def sum_replicated(self, grad: Tensor) -> None:
        """Sum the `replicated` ranges of a flat gradient over the tensor-parallel ranks, in place."""
        for begin, end in self.replicated:
            own = grad[begin:end]
            own.copy_(all_reduce_sum(own, self.mesh.tp))

    def whole_weight(self, model: Decoder, name: str) -> Tensor:
        return model.get_parameter(name)

    def sum_words(self, words: Tensor) -> Tensor:
        """The words of an `ops.exact_sum` over all ranks, from this rank's words."""
        return words

    def gather_whole(self, local: Tensor) -> Tensor:
        """A flat tensor, gathered from all ranks into the layout of one process. Every rank calls it; the first gets
        the result, on the host if there are several ranks, and the others get an empty tensor."""
        return local

    def load_parts(self, own: Tensor, parts: Sequence[Buffer], tp: int = 1) -> None:
        """Fill this rank's part of a flat tensor from the parts of any number of ranks, and zero its padding.

        Args:
            parts: by rank, of the ranks that saved them. tp: the tensor-parallel size of these ranks.

        Raises:
            ValueError: the parts do not have the parameters' size.
        """
        shapes, of_them = self.whole_layout.shapes, Mesh(tp=Axis("tp", tp))
        cut = [on.part_shape(of_them, shape) for on, shape in zip(self.placements, shapes, strict=True)]
        theirs = Layout.of(cut, len(parts) // tp)
        for buffer in parts:
            if list(buffer.shape) != [theirs.size]:
                raise ValueError(f"expected shape [{theirs.size}], found {list(buffer.shape)}")
        own.zero_()
        for i, (on, shape) in enumerate(zip(self.placements, shapes, strict=True)):
            others, first, begins = Shares(on, shape, tp, theirs.sizes[i]), self.layout.offsets[i], theirs.offsets[i]
            for at, there, length in self._shares(i).pieces_of(self.rank):
                for source, begin, count in others.locate(there, length):
                    own[first + at : first + at + count].copy_(parts[source][begins + begin : begins + begin + count])
                    at += count

    def ranges_to_write(self, model: Decoder) -> dict[str, list[TensorRange]]:
        """The ranges of the trained `model`'s tensors that this rank writes to a file: its part of those that are
        sharded, and an equal share of those that every rank has whole."""
        found, mesh = {} if self.has_separate_shard else self.own_ranges(), self.mesh
        placements = dict(model.placements) | dict.fromkeys((name for name, _ in model.named_buffers()), WHOLE)
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            on = placements[name]
            if name not in found:
                shape = whole_shape(on, mesh, tensor.shape)
                shares = Shares(on, shape, mesh.tp.size, -(-tensor.numel() // mesh.fsdp.size))
                values, first = tensor.detach().flatten(), mesh.fsdp.rank * shares.size
                pieces = shares.pieces_of(self.rank)
                found[name] = [TensorRange(values[first + at : first + at + n], there) for at, there, n in pieces]
            if on.tp is None and mesh.tp.rank > 0:  # the first rank along `tp` writes what is replicated over it
                found[name] = []
        return found


class ShardedParameters(FlatParameters):
    """`FlatParameters` of several ranks, with both buffers sharded: each rank's tensor-parallel part is cut along
    `fsdp`. Micro-batches read the model's own parameters, which are whole: ZeRO stage 2. With `float32` the shard of
    the weights is the optimizer's masters, rounded when gathered; otherwise it has the model's dtype.

    After an update, `gather` writes the model's own parameters. Where a separate `reader` generates (with the whole
    weights or a part), it writes the reader's instead; the model then has memory for frozen parameters alone, and the
    caller fills the shard (`own_ranges`).

    Attributes:
        gathering: the inputs of `gather`.
    """

    def __init__(
        self,
        model: Decoder,
        mesh: Mesh,
        frozen: Collection[str] = (),
        reader: Decoder | None = None,
        float32: bool = False,
    ) -> None:
        self.axis, self.reads_own = mesh.fsdp, reader is None
        self.has_separate_shard = self.reads_own
        super().__init__(model, mesh, frozen, float32)
        if mesh.tp.size > 1:
            self.replicated = self._replicated()
            self.counted = self._counted()
        reader = reader or model
        own = {name: p.data for name, p in reader.named_parameters() if name in self.names}
        place = {} if reader.spread.index is None else {"place": reader.spread.index}
        self._read_by, parts = reader.spread.axis, dict(zip(self.names, self.parts, strict=True))
        self.gathering = graph.Inputs(param=parts, buffer={**own, **place})

    def _views(self, flat: Tensor) -> list[Tensor]:
        return self.layout.flat_views(flat)

    def _bind_parameters(self) -> None:
        if self.has_separate_shard:
            self.copy_from_model()

    def _pair_with_model(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Pieces of each part without its padding, paired with the same elements of the model's own parameter."""
        for parameter, part in zip(self.parameters, self.parts, strict=True):
            own = parameter.data.flatten()[part.numel() * self.axis.rank :][: part.numel()]
            yield from zip(part[: own.numel()].split(_PIECE), own.split(_PIECE), strict=True)

    def copy_from_model(self) -> None:
        """Refresh the shard from the model's own parameters."""
        self.data.zero_()
        for part, own in self._pair_with_model():
            part.copy_(own)

    def equals_model(self) -> bool:
        pairs = self._pair_with_model()
        return self.has_separate_shard and all(torch.equal(part, own.to(part.dtype)) for part, own in pairs)

    def _replicated(self) -> Sequence[tuple[int, int]]:
        found = list[tuple[int, int]]()
        for on, (begin, end) in zip(self.placements, pairwise(self.layout.offsets), strict=True):
            if on.tp is None:
                if found and found[-1][1] == begin:
                    begin, _ = found.pop()
                found.append((begin, end))
        return found

    def _counted(self) -> dict[str, Tensor]:
        """What is replicated over `tp` counts in the norm on the first rank alone."""
        own = torch.ones(self.layout.size // ALIGNMENT, dtype=torch.bool)
        for begin, end in self.replicated:
            own[begin // ALIGNMENT : end // ALIGNMENT] = self.mesh.tp.rank == 0
        return {"counted": own.to(self.data.device)}

    def gather(self, inputs: graph.Inputs) -> dict[str, Tensor]:
        axis, place = self._read_by, inputs.buffer.get("place")
        for on, (name, part) in zip(self.placements, inputs.param.items(), strict=True):
            found = gather_whole(on, self.gather_parameter(name, part), self.mesh.tp)
            inputs.buffer[name].copy_(found if place is None else take_part_at(on, found, axis, place))
        return {}

    def whole_weight(self, model: Decoder, name: str) -> Tensor:
        if self.reads_own or name not in self.names:
            part = model.get_parameter(name).detach()
        else:
            part = self.gather_parameter(name, self.gathering.param[name])
        return gather_whole(model.placements[name], part, self.mesh.tp)

    @contextmanager
    def reduce_statistics(self, inputs: graph.Inputs, maxima: Sequence[int]) -> Iterator[graph.Inputs]:
        values = inputs.buffer["statistics"]
        own = torch.zeros_like(values)
        yield replace(inputs, buffer={**inputs.buffer, "statistics": own})
        rows = distributed.all_gather(
            all_reduce_max(own, self.mesh.tp), self.axis
        )  # equal along tp, unless a rank went wrong
        highest = [torch.maximum(values[i], rows[:, i].amax()) for i in maxima]
        ops.fold_rows(values, rows)
        for i, value in zip(maxima, highest, strict=True):
            values[i].copy_(value)

    def accumulate(self, totals: Sequence[Tensor], grads: Sequence[Tensor], names: Sequence[str] | None = None) -> None:
        """Reduce-scatter the gradients into this rank's shards of the float32 totals, in rank order or cell by cell."""
        for name, total, grad in zip(names or self.names, totals, grads, strict=True):
            with _attributed_to(name), graph.backward():
                self._reduce_scatter(total, grad)

    def _reduce_scatter(self, total: Tensor, grad: Tensor) -> None:
        """Add all ranks' gradients to this rank's shard of the total. Where a cell spans several ranks, they sum theirs
        before the exchange with other cells."""
        axis, cell, size = self.axis, self.cell, total.numel()
        if 1 < cell == self.mesh.ranks_per_cell:
            grad, cell = ops.sum_rows(distributed.all_to_all_in_cell(grad, size, self.mesh)), 0
            axis = self.mesh.cells[1]
        ops.fold_rows(total, distributed.all_to_all(grad, size, axis), cell)

    def sum_words(self, words: Tensor) -> Tensor:
        for axis in self.mesh.axes:
            words = distributed.all_gather(words, axis).sum(0)
        return words

    def gather_whole(self, local: Tensor) -> Tensor:
        layout, first = self.whole_layout, self.axis.rank == self.mesh.tp.rank == 0
        gathered = torch.zeros(layout.size if first else 0, dtype=local.dtype)
        for i, part in enumerate(self._views(local)):
            own = distributed.unshard(part.to(self.data.device), self.layout.shapes[i], self.axis)
            found = gather_whole(self.placements[i], own, self.mesh.tp).flatten()
            if first:
                gathered[layout.offsets[i] :][: found.numel()] = found
        return gathered


def _attributed_to(name: str) -> AbstractContextManager[None]:
    """Attribute collectives within to the module that the parameter belongs to."""
    return graph.in_module(name.rpartition(".")[0])
