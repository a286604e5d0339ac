"""A model's weights and their gradients as flat buffers: whole in one process, on several ranks a shard on each.

Sums over ranks are made in the order of the ranks, row by row, so that they are the sums of one process that runs the
same micro-batches one after another.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate as running_totals
from math import prod
from typing import Protocol

import torch
from torch import Tensor

from .. import distributed, graph, ops
from ..distributed.mesh import ALONE, Mesh
from ..models import Decoder, Held
from ..ops import SQUARES_BLOCK

ALIGNMENT = SQUARES_BLOCK  # elements: whole blocks of the gradient's norm, and well aligned for vector loads


@dataclass(frozen=True)
class Layout:
    """The flat buffer of each of `ranks` ranks: part after part, one a parameter, in order.

    A parameter, flat and padded with zeros at its end, is cut into equal parts of whole `ALIGNMENT`s, the first to rank
    0. All ranks' buffers are laid out alike, so nothing that is computed from the layout depends on the rank.

    Attributes:
        sizes, offsets: elements of each part, and where it begins; the last offset is the buffer's size.
    """

    shapes: tuple[tuple[int, ...], ...]
    ranks: int
    sizes: tuple[int, ...]
    offsets: tuple[int, ...]

    @staticmethod
    def of(shapes: Sequence[Sequence[int]], ranks: int = 1) -> Layout:
        """The layout of parameters of these shapes."""
        sizes = tuple(-(-prod(shape) // (ALIGNMENT * ranks)) * ALIGNMENT for shape in shapes)
        return Layout(tuple(map(tuple, shapes)), ranks, sizes, (0, *running_totals(sizes)))

    @property
    def size(self) -> int:
        """Elements of a buffer."""
        return self.offsets[-1]

    @cached_property
    def one_rank(self) -> Layout:
        """The layout of the same parameters in one process."""
        return Layout.of(self.shapes)

    def views(self, flat: Tensor) -> list[Tensor]:
        """The parts of a buffer: of a parameter's shape in one process, flat otherwise."""
        spans = list(zip(self.shapes, self.sizes, self.offsets, strict=False))
        if self.ranks == 1:
            return [flat[at : at + prod(shape)].view(shape) for shape, _, at in spans]
        return [flat[at : at + size] for _, size, at in spans]

    def cut(self, whole: Tensor, rank: int) -> Tensor:
        """The buffer of a rank, from that of a single process."""
        buffer = whole.new_zeros(self.size)
        for at, count, _, begin in self.overlaps(rank, self.one_rank):
            buffer[at : at + count] = whole[begin : begin + count]
        return buffer

    def overlaps(self, rank: int, other: Layout) -> Iterator[tuple[int, int, int, int]]:
        """What of a rank's buffer lies where in those of another layout of the same parameters, in order: where it
        begins here, its size, the other rank, and where it begins there. Padding is left out where the other has none.
        """
        spans = zip(self.shapes, self.sizes, self.offsets, other.sizes, other.offsets, strict=False)
        for shape, size, at, width, begin in spans:
            first, last = rank * size, min((rank + 1) * size, prod(shape))
            while first < last:
                source, inside = divmod(first, width)
                count = min(last - first, width - inside)
                yield at + first - rank * size, count, source, begin + inside
                first += count


class Buffer(Protocol):
    """A flat tensor, perhaps in a file, that is read in pieces."""

    @property
    def shape(self) -> Sequence[int]: ...

    def __getitem__(self, part: slice) -> Tensor: ...


class FlatParameters:
    """One buffer for a model's weights, one float32 buffer for their gradients; this class: of one process.

    The model's parameters are re-pointed in place, as views of the buffer, and keep their values. Those that are frozen
    stay as they are, whole on every rank.

    Args:
        frozen: names of parameters that are not trained.

    Attributes:
        names, parameters: the model's own, in buffer order: matrices, then vectors; a tied one stands once.
        layout: where each lies.
        parts, grads: views of `data` and `grad`, one a parameter: its shape in one process, flat where it is sharded.
        data, grad: [layout.size], compute dtype and float32; the gaps are zero and stay so.
        num_matrix_elements: where the vectors begin.
    """

    def __init__(self, model: Decoder, mesh: Mesh = ALONE, frozen: Collection[str] = ()) -> None:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name not in frozen)
        trained = [item for item in model.named_parameters() if item[0] not in frozen]
        named = sorted(trained, key=lambda item: item[1].dim() < 2)  # stable
        self.names, self.parameters = [name for name, _ in named], [parameter for _, parameter in named]
        first = self.parameters[0]
        assert all(p.dtype == first.dtype and p.device == first.device for p in self.parameters)
        shapes = [model.placements[name].shape_on(mesh, tuple(p.shape)) for name, p in named]
        self.layout = Layout.of(shapes, mesh.fsdp.size)
        self.num_matrix_elements = self.layout.offsets[sum(p.dim() >= 2 for p in self.parameters)]
        self.data = torch.zeros(self.layout.size, dtype=first.dtype, device=first.device)
        self.grad = torch.zeros(self.layout.size, dtype=torch.float32, device=first.device)
        self.parts, self.grads = self.layout.views(self.data), self.layout.views(self.grad)
        self._take_over()

    def _take_over(self) -> None:
        for parameter, part in zip(self.parameters, self.parts, strict=True):
            part.copy_(parameter.data)
            parameter.data = part

    def inputs(self, model: Decoder) -> graph.Inputs:
        """What a function of the model is bound to: its weights as they are trained, and its other tensors."""
        return graph.module_inputs(model)

    @contextmanager
    def micro_batch(
        self, inputs: graph.Inputs, maxima: Sequence[int], differentiated: bool = True
    ) -> Iterator[graph.Inputs]:
        """`inputs` with the weights to compute a micro-batch with, and statistics to add its own to.

        Args:
            maxima: of the statistics, those that are no sums.
            differentiated: gradients by the weights are taken.
        """
        yield inputs

    @contextmanager
    def summed(self, inputs: graph.Inputs, maxima: Sequence[int]) -> Iterator[graph.Inputs]:
        """`inputs` with statistics to add a micro-batch's own to; in the end, those of all ranks are added."""
        yield inputs

    def accumulate(self, totals: Sequence[Tensor], grads: Sequence[Tensor], names: Sequence[str] | None = None) -> None:
        """Add each gradient to its total, such as `grads`, in the total's precision, in order; by default of all."""
        for total, grad in zip(totals, grads, strict=True):
            total.add_(grad)

    def summed_words(self, words: Tensor) -> Tensor:
        """The words of an `ops.exact_sum` over all ranks' numbers, from those of this rank's."""
        return words

    def whole(self, local: Tensor) -> Tensor:
        """What all ranks have of a flat tensor, in the layout of one process. Every rank calls it; the first gets the
        result, on the host where it came from several ranks, and the others an empty tensor."""
        return local

    def fill(self, own: Tensor, parts: Sequence[Buffer]) -> None:
        """Fill this rank's part of a flat tensor from what any number of ranks have of it, by rank; zero its gaps.

        Raises:
            ValueError: theirs are not of the parameters' size.
        """
        theirs = Layout.of(self.layout.shapes, len(parts))
        for buffer in parts:
            if list(buffer.shape) != [theirs.size]:
                raise ValueError(f"expected shape [{theirs.size}], found {list(buffer.shape)}")
        end = 0
        for at, count, source, begin in self.layout.overlaps(self.rank, theirs):
            own[end:at].zero_()
            end = at + count
            own[at:end].copy_(parts[source][begin : begin + count])
        own[end:].zero_()

    def held(self, model: Decoder) -> dict[str, Held]:
        """What this rank writes of the model's tensors: its parts, and as large ones of what all ranks have whole."""
        shapes = dict(zip(self.names, self.layout.shapes, strict=True))
        parts, found = dict(zip(self.names, self.parts, strict=True)), {}
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            part = parts[name] if shapes.get(name) == tuple(tensor.shape) else None
            size = -(-tensor.numel() // self.layout.ranks) if part is None else part.numel()
            first = min(self.rank * size, tensor.numel())
            values = tensor.detach().flatten()[first:] if part is None else part.flatten()
            found[name] = Held(values[: min(size, tensor.numel() - first)], first)
        return found

    @property
    def rank(self) -> int:
        """Whose part it is."""
        return 0


class ShardedParameters(FlatParameters):
    """`FlatParameters` of one of several ranks, which has a shard of both buffers, cut along the mesh's `fsdp`.

    The model keeps parameters of its own, which `gather` brings up to date.

    Attributes:
        gathering: what `gather` reads and writes.
    """

    def __init__(self, model: Decoder, mesh: Mesh, frozen: Collection[str] = ()) -> None:
        self.axis = mesh.fsdp
        super().__init__(model, mesh, frozen)
        own = {name: p.data for name, p in zip(self.names, self.parameters, strict=True)}
        self.gathering = graph.Inputs(param=self._named_parts(), buffer=own)

    def _take_over(self) -> None:
        for parameter, part in zip(self.parameters, self.parts, strict=True):
            own = parameter.data.flatten()[part.numel() * self.axis.rank :][: part.numel()]
            part[: own.numel()].copy_(own)

    def _named_parts(self) -> dict[str, Tensor]:
        return dict(zip(self.names, self.parts, strict=True))

    def inputs(self, model: Decoder) -> graph.Inputs:
        found, parts = super().inputs(model), self._named_parts()
        frozen = {name: tensor for name, tensor in found.param.items() if name not in parts}
        return replace(found, param=parts | frozen, module=None)

    @torch.no_grad()
    def gathered(self, name: str, part: Tensor) -> Tensor:
        """A whole parameter, from this rank's part of it."""
        with _serving(name):
            return distributed.unshard(part, self.layout.shapes[self.names.index(name)], self.axis)

    def gather(self, inputs: graph.Inputs) -> dict[str, Tensor]:
        """Bring the model's own parameters (`gathering`) up to date."""
        for name, part in inputs.param.items():
            inputs.buffer[name].copy_(self.gathered(name, part))
        return {}

    @contextmanager
    def micro_batch(
        self, inputs: graph.Inputs, maxima: Sequence[int], differentiated: bool = True
    ) -> Iterator[graph.Inputs]:
        """With whole weights, and statistics that are added to those of all ranks in the end, on every rank.

        Without gradients the separate operators compute: fused products read weights before the kernel before is
        complete, and here the weights are gathered in the same graph.
        """
        parts = {n: part for n, part in inputs.param.items() if n in self.names}
        weights = {n: self.gathered(n, part).requires_grad_(differentiated) for n, part in parts.items()}
        with torch.set_grad_enabled(torch.is_grad_enabled() or not differentiated), self.summed(inputs, maxima) as own:
            yield replace(own, module=None, param={**inputs.param, **weights})

    @contextmanager
    def summed(self, inputs: graph.Inputs, maxima: Sequence[int]) -> Iterator[graph.Inputs]:
        values = inputs.buffer["statistics"]
        own = torch.zeros_like(values)
        yield replace(inputs, buffer={**inputs.buffer, "statistics": own})
        rows = distributed.gather(own, self.axis)
        largest = [torch.maximum(values[i], rows[:, i].amax()) for i in maxima]
        ops.fold_rows(values, rows)
        for i, value in zip(maxima, largest, strict=True):
            values[i].copy_(value)

    def accumulate(self, totals: Sequence[Tensor], grads: Sequence[Tensor], names: Sequence[str] | None = None) -> None:
        """Add whole gradients of all ranks to this rank's part of the totals, float32, rank by rank."""
        for name, total, grad in zip(names or self.names, totals, grads, strict=True):
            with _serving(name), graph.backward():
                ops.fold_rows(total, distributed.exchange(grad, total.numel(), self.axis))

    def summed_words(self, words: Tensor) -> Tensor:
        return distributed.gather(words, self.axis).sum(0)

    def whole(self, local: Tensor) -> Tensor:
        one, first = self.layout.one_rank, self.axis.rank == 0
        whole = torch.zeros(one.size if first else 0, dtype=local.dtype)
        for part, size, at in zip(self.layout.views(local), one.sizes, one.offsets, strict=False):
            parts = distributed.gather(part.to(self.data.device), self.axis).flatten()
            if first:
                whole[at : at + size] = parts[:size]
        return whole

    @property
    def rank(self) -> int:
        return self.axis.rank


def flat_parameters(model: Decoder, mesh: Mesh, frozen: Collection[str] = ()) -> FlatParameters:
    """A model's parameters, but for those that are `frozen`, as they are trained on this mesh."""
    kind = ShardedParameters if mesh.fsdp.size > 1 else FlatParameters
    return kind(model, mesh, frozen)


def _serving(name: str) -> AbstractContextManager[None]:
    """Marks a collective as one for the module that the parameter belongs to."""
    return graph.in_module(name.rpartition(".")[0])
