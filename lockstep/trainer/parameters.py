"""A model's weights and their gradients as flat buffers: whole in one process, on several ranks a shard on each.

Sums over ranks are made in the order of the ranks, row by row, so that they are the sums of one process that runs the
same micro-batches one after another.
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
from ..distributed.collectives import largest, sum_of_all
from ..distributed.mesh import ALONE, Axis, Mesh
from ..distributed.pieces import Shares, part_at, whole, whole_shape
from ..distributed.placement import WHOLE
from ..models import Decoder, Held
from ..ops import SQUARES_BLOCK

_PIECE = 1 << 24  # elements of the weights that are rounded or compared at one time
ALIGNMENT = SQUARES_BLOCK  # elements: whole blocks of the gradient's norm, and well aligned for vector loads


@dataclass(frozen=True)
class Layout:
    """The flat buffer of each of `ranks` ranks: part after part, one a parameter, in order.

    A parameter, flat and padded with zeros, is cut into equal parts of whole `ALIGNMENT`s, the first to rank 0. All
    ranks' buffers are laid out alike, so nothing that is computed from the layout depends on the rank.

    Attributes:
        sizes, offsets: elements of each part, and where it begins; the last offset is the buffer's size.
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
        """The parts of a buffer of one rank, each of its parameter's shape."""
        return [flat[at : at + prod(s)].view(s) for s, at in zip(self.shapes, self.offsets, strict=False)]

    def flat_views(self, flat: Tensor) -> list[Tensor]:
        """The parts of a buffer, flat and padded."""
        return [flat[at : at + size] for size, at in zip(self.sizes, self.offsets, strict=False)]


class Buffer(Protocol):
    """A flat tensor, perhaps in a file, that is read in pieces."""

    @property
    def shape(self) -> Sequence[int]: ...

    def __getitem__(self, part: slice) -> Tensor: ...


class FlatWeights:
    """Some of a model's parameters in one buffer: of several ranks each has a part of each.

    Args:
        model: as it is on the mesh, where ranks share its products.
        names: of the parameters, the model's own; a tied one stands once.

    Attributes:
        names, parameters: as given, in buffer order. dtype: the parameters'.
        layout: where each lies. whole_layout: where they lie in one process, which shares no product.
        data: [layout.size], of `dtype`, or float32; the gaps are zero and stay so.
        parts: views of `data`, one a parameter: its shape in one process, flat where it is sharded.
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
    def gathered(self, name: str, part: Tensor) -> Tensor:
        """A parameter as the model has it, from all ranks' parts of it, which are rounded before they travel."""
        with _serving(name):
            return distributed.unshard(part.to(self.dtype), self.layout.shapes[self.names.index(name)], self.mesh.fsdp)

    def own(self) -> dict[str, list[Held]]:
        """This rank's ranges of the parameters."""
        found = dict[str, list[Held]]()
        for i, (name, part) in enumerate(zip(self.names, self.parts, strict=True)):
            flat = part.flatten()
            found[name] = [Held(flat[at : at + count], there) for at, there, count in self._shares(i).held(self.rank)]
        return found

    def round(self) -> None:
        """Round a float32 buffer, which was filled from weights of any dtype, to the parameters' dtype."""
        for piece in self.data.split(_PIECE):
            piece.copy_(piece.to(self.dtype))

    def _shares(self, index: int) -> Shares:
        shape, size = self.whole_layout.shapes[index], self.layout.sizes[index]
        return Shares(self.placements[index], shape, self.mesh.tp.size, size)

    @property
    def rank(self) -> int:
        """Whose part it is, of all ranks."""
        return self.mesh.fsdp.rank * self.mesh.tp.size + self.mesh.tp.rank


class FlatParameters(FlatWeights):
    """One buffer for a model's weights, one float32 buffer for their gradients; this class: of one process.

    The model's parameters are re-pointed in place, as views of the buffer. Those that are frozen stay as they are,
    whole on every rank. Matrices come first, then vectors.

    Args:
        frozen: names of parameters that are not trained.

    Attributes:
        reads_own: whether the model's own parameters are the weights, whole. beside: they are, in memory of their own.
        grads: views of `grad`, as `parts` are of `data`.
        grad: [layout.size], float32; the gaps are zero and stay so.
        num_matrix_elements: where the vectors begin.
        counted: "counted", which blocks of `grad` this rank counts in the norm, bool; where it is empty, all.
        alike: from where to where `grad` is of what ranks that share products have alike. Each has the gradients of its
            own work there, until an update adds them up (`add_up_alike`).
        cell: of ranks that have whole cells at once, how many of them make one (`Cells.of_a_round`).
        cells: where cells take several micro-batches, the sum of those before the one that `grad` is of.
    """

    reads_own = True
    beside = False
    alike: Sequence[tuple[int, int]] = ()
    cell: int = 0
    cells: Tensor | None = None

    def __init__(self, model: Decoder, mesh: Mesh = ALONE, frozen: Collection[str] = (), float32: bool = False) -> None:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name not in frozen)
        trained = [item for item in model.named_parameters() if item[0] not in frozen]
        names = [name for name, _ in sorted(trained, key=lambda item: item[1].dim() < 2)]
        super().__init__(model, mesh, names, float32)
        self.counted: dict[str, Tensor] = {}
        self.num_matrix_elements = self.layout.offsets[sum(p.dim() >= 2 for p in self.parameters)]
        self.grad = torch.zeros(self.layout.size, dtype=torch.float32, device=self.data.device)
        self.grads = self._views(self.grad)
        self._take_over()

    def _views(self, flat: Tensor) -> list[Tensor]:
        return self.layout.views(flat)

    def _take_over(self) -> None:
        for parameter, part in zip(self.parameters, self.parts, strict=True):
            part.copy_(parameter.data)
            parameter.data = part

    def reread(self) -> None:
        """Nothing: the model's parameters are the buffer."""

    def as_read(self) -> bool:
        """Whether `data` has memory of its own and is what `reread` makes it."""
        return False

    def inputs(self, model: Decoder) -> graph.Inputs:
        """What a function of the model is bound to: its weights as they are trained, and its other tensors."""
        return graph.module_inputs(model)

    def micro_batch(
        self, inputs: graph.Inputs, maxima: Sequence[int], differentiated: bool = True
    ) -> AbstractContextManager[graph.Inputs]:
        """`inputs` with the weights to compute a micro-batch with, and statistics to add its own to; `maxima` are those
        of them that are no sums. `differentiated`: gradients by the weights are taken."""
        return self.summed(inputs, maxima)

    def summed(self, inputs: graph.Inputs, maxima: Sequence[int]) -> AbstractContextManager[graph.Inputs]:
        """`inputs` with statistics to add a micro-batch's own to; in the end, those of all ranks are added."""
        return nullcontext(inputs)

    def accumulate(self, totals: Sequence[Tensor], grads: Sequence[Tensor], names: Sequence[str] | None = None) -> None:
        """Add each gradient to its total, such as `grads`, in the total's precision, in order; by default of all."""
        for total, grad in zip(totals, grads, strict=True):
            total.add_(grad)

    def add_up(self, cells: Cells) -> None:
        self.cell = cells.of_a_round
        self.cells = torch.zeros_like(self.grad) if cells.span_rounds else None

    def end_cell(self, inputs: graph.Inputs) -> dict[str, Tensor]:
        """Add the sum of a cell, which ends, to that of the cells before it; the next begins from 0."""
        grad = inputs.grad["grad"]
        inputs.buffer["cells"].add_(grad)
        grad.zero_()
        return {}

    def end_cells(self, inputs: graph.Inputs) -> dict[str, Tensor]:
        """The same of an update's last cell, with all of the sum where the update reads it."""
        cells = inputs.buffer["cells"]
        inputs.grad["grad"].add_(cells)  # of two numbers the order is free
        cells.zero_()
        return {}

    def add_up_alike(self, grad: Tensor) -> None:
        """Add up what the ranks' own work has made of a flat gradient where they have the parameters `alike`."""
        for begin, end in self.alike:
            own = grad[begin:end]
            own.copy_(sum_of_all(own, self.mesh.tp))

    def weight(self, model: Decoder, name: str) -> Tensor:
        return model.get_parameter(name)

    def summed_words(self, words: Tensor) -> Tensor:
        """The words of an `ops.exact_sum` over all ranks' numbers, from those of this rank's."""
        return words

    def whole(self, local: Tensor) -> Tensor:
        """What all ranks have of a flat tensor, in the layout of one process. Every rank calls it; the first gets the
        result, on the host where it came from several ranks, the others an empty tensor."""
        return local

    def fill(self, own: Tensor, parts: Sequence[Buffer], tp: int = 1) -> None:
        """Fill this rank's part of a flat tensor from what any number of ranks have of it, by rank; zero its gaps.

        Args:
            tp: of them, how many neighbours share each product.

        Raises:
            ValueError: theirs are not of the parameters' size.
        """
        shapes, of_them = self.whole_layout.shapes, Mesh(tp=Axis("tp", tp))
        cut = [on.shape_on(of_them, shape) for on, shape in zip(self.placements, shapes, strict=True)]
        theirs = Layout.of(cut, len(parts) // tp)
        for buffer in parts:
            if list(buffer.shape) != [theirs.size]:
                raise ValueError(f"expected shape [{theirs.size}], found {list(buffer.shape)}")
        own.zero_()
        for i, (on, shape) in enumerate(zip(self.placements, shapes, strict=True)):
            others, first, begins = Shares(on, shape, tp, theirs.sizes[i]), self.layout.offsets[i], theirs.offsets[i]
            for at, there, length in self._shares(i).held(self.rank):
                for source, begin, count in others.find(there, length):
                    own[first + at : first + at + count].copy_(parts[source][begins + begin : begins + begin + count])
                    at += count

    def held(self, model: Decoder) -> dict[str, list[Held]]:
        """What this rank writes of the tensors of `model`, which is trained: its ranges, and as large ones of what all
        ranks have whole."""
        found, mesh = {} if self.beside else self.own(), self.mesh
        placements = dict(model.placements) | dict.fromkeys((name for name, _ in model.named_buffers()), WHOLE)
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            on = placements[name]
            if name not in found:
                shape = whole_shape(on, mesh, tensor.shape)
                shares = Shares(on, shape, mesh.tp.size, -(-tensor.numel() // mesh.fsdp.size))
                values, first = tensor.detach().flatten(), mesh.fsdp.rank * shares.size
                pieces = shares.held(self.rank)
                found[name] = [Held(values[first + at : first + at + n], there) for at, there, n in pieces]
            if on.tp is None and mesh.tp.rank > 0:  # the first along `tp` writes what they have alike
                found[name] = []
        return found


class ShardedParameters(FlatParameters):
    """`FlatParameters` of one of several ranks, which has a shard of both buffers: of what it has by `tp`, a part cut
    along the mesh's `fsdp`. Micro-batches read the model's own parameters, which are whole: ZeRO's stage 2. With
    `float32` the shard is of the optimizer's masters, and gathers round it; else of weights of the model's dtype.

    `gather` brings those up to date. Where another model is the `reader` that generates, with all of the weights or a
    part, they are the reader's, the model has none but frozen ones, and the shard is to be filled (`own`).

    Attributes:
        gathering: what `gather` reads and writes.
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
        self.beside = self.reads_own
        super().__init__(model, mesh, frozen, float32)
        if mesh.tp.size > 1:
            self.alike = self._alike()
            self.counted = self._counted()
        reader = reader or model
        own = {name: p.data for name, p in reader.named_parameters() if name in self.names}
        place = {} if reader.spread.index is None else {"place": reader.spread.index}
        self._read_by, parts = reader.spread.axis, dict(zip(self.names, self.parts, strict=True))
        self.gathering = graph.Inputs(param=parts, buffer={**own, **place})

    def _views(self, flat: Tensor) -> list[Tensor]:
        return self.layout.flat_views(flat)

    def _take_over(self) -> None:
        if self.beside:
            self.reread()

    def _beside(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Of each part what is no gap, and what the model's own parameter has there: in pieces."""
        for parameter, part in zip(self.parameters, self.parts, strict=True):
            own = parameter.data.flatten()[part.numel() * self.axis.rank :][: part.numel()]
            yield from zip(part[: own.numel()].split(_PIECE), own.split(_PIECE), strict=True)

    def reread(self) -> None:
        """Fill the shard from the model's own parameters."""
        self.data.zero_()
        for part, own in self._beside():
            part.copy_(own)

    def as_read(self) -> bool:
        return self.beside and all(torch.equal(part, own.to(part.dtype)) for part, own in self._beside())

    def _alike(self) -> Sequence[tuple[int, int]]:
        found = list[tuple[int, int]]()
        for on, (begin, end) in zip(self.placements, pairwise(self.layout.offsets), strict=True):
            if on.tp is None:
                joins = bool(found) and found[-1][1] == begin
                found.append((found.pop()[0] if joins else begin, end))
        return found

    def _counted(self) -> dict[str, Tensor]:
        """What the ranks of `tp` have alike, the first has for the norm."""
        own = torch.ones(self.layout.size // ALIGNMENT, dtype=torch.bool)
        for begin, end in self.alike:
            own[begin // ALIGNMENT : end // ALIGNMENT] = self.mesh.tp.rank == 0
        return {"counted": own.to(self.data.device)}

    def gather(self, inputs: graph.Inputs) -> dict[str, Tensor]:
        axis, place = self._read_by, inputs.buffer.get("place")
        for on, (name, part) in zip(self.placements, inputs.param.items(), strict=True):
            found = whole(on, self.gathered(name, part), self.mesh.tp)
            inputs.buffer[name].copy_(found if place is None else part_at(on, found, axis, place))
        return {}

    def weight(self, model: Decoder, name: str) -> Tensor:
        own = self.reads_own or name not in self.names
        part = model.get_parameter(name).detach() if own else self.gathered(name, self.gathering.param[name])
        return whole(model.placements[name], part, self.mesh.tp)

    @contextmanager
    def summed(self, inputs: graph.Inputs, maxima: Sequence[int]) -> Iterator[graph.Inputs]:
        values = inputs.buffer["statistics"]
        own = torch.zeros_like(values)
        yield replace(inputs, buffer={**inputs.buffer, "statistics": own})
        rows = distributed.gather(largest(own, self.mesh.tp), self.axis)  # alike along it, unless one has gone wrong
        highest = [torch.maximum(values[i], rows[:, i].amax()) for i in maxima]
        ops.fold_rows(values, rows)
        for i, value in zip(maxima, highest, strict=True):
            values[i].copy_(value)

    def accumulate(self, totals: Sequence[Tensor], grads: Sequence[Tensor], names: Sequence[str] | None = None) -> None:
        """Add whole gradients of all ranks to this rank's part of the totals, float32, by rank, or cell by cell."""
        for name, total, grad in zip(names or self.names, totals, grads, strict=True):
            with _serving(name), graph.backward():
                self._add_all(total, grad)

    def _add_all(self, total: Tensor, grad: Tensor) -> None:
        """Add all ranks' gradient to this rank's part; that of a cell of `lanes` before it leaves them."""
        axis, cell, size = self.axis, self.cell, total.numel()
        if 1 < cell == self.mesh.lanes:
            grad, cell = ops.sum_rows(distributed.exchange_in_cells(grad, size, self.mesh)), 0
            axis = self.mesh.cells[1]
        ops.fold_rows(total, distributed.exchange(grad, size, axis), cell)

    def summed_words(self, words: Tensor) -> Tensor:
        for axis in self.mesh.axes:
            words = distributed.gather(words, axis).sum(0)
        return words

    def whole(self, local: Tensor) -> Tensor:
        one, first = self.whole_layout, self.axis.rank == self.mesh.tp.rank == 0
        all_of_it = torch.zeros(one.size if first else 0, dtype=local.dtype)
        for i, part in enumerate(self._views(local)):
            own = distributed.unshard(part.to(self.data.device), self.layout.shapes[i], self.axis)
            found = whole(self.placements[i], own, self.mesh.tp).flatten()
            if first:
                all_of_it[one.offsets[i] :][: found.numel()] = found
        return all_of_it


def _serving(name: str) -> AbstractContextManager[None]:
    """Marks a collective as one for the module that the parameter belongs to."""
    return graph.in_module(name.rpartition(".")[0])
