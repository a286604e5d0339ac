"""What the policy step does besides where weights and gradients are sharded: gather, exchange, and add up in order.

Sums over ranks are made in the order of the ranks, row by row, so that they are the sums of one process that runs the
same micro-batches one after another.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from ... import distributed, graph
from ..optimizer import FlatParameters, accumulate


@dataclass(frozen=True)
class Sharding:
    """How weights and gradients lie on `ranks` ranks; on one they are whole.

    Attributes:
        shapes: of the parameters, by name, in the order of gradients.
    """

    ranks: int
    shapes: dict[str, tuple[int, ...]]

    @staticmethod
    def of(flat: FlatParameters) -> Sharding:
        """That of a trainer's parameters."""
        return Sharding(flat.world.size, dict(zip(flat.names, flat.layout.shapes, strict=True)))

    @contextmanager
    def substituted(
        self, model: nn.Module, inputs: graph.Inputs, differentiated: bool = True
    ) -> Iterator[list[Tensor]]:
        """`model` with the whole weights of `inputs.param`, which are what to differentiate by, in order."""
        if self.ranks > 1:
            whole = {n: self.gathered(n, part).requires_grad_(differentiated) for n, part in inputs.param.items()}
            inputs = replace(inputs, param=whole, module=None)
        with graph.substituted(model, inputs):
            yield [inputs.param[name] for name in self.shapes]

    @torch.no_grad()
    def gathered(self, name: str, part: Tensor) -> Tensor:
        """A whole parameter, from this rank's part of it."""
        with _serving(name):
            return distributed.unshard(part, self.shapes[name], self.ranks)

    def accumulate(self, totals: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
        """Add whole gradients of all ranks to this rank's part of the totals, float32, rank by rank."""
        if self.ranks == 1:
            accumulate(totals, grads)
            return
        for name, total, grad in zip(self.shapes, totals, grads, strict=True):
            with _serving(name), graph.backward():
                for part in distributed.exchange(grad, total.numel(), self.ranks).unbind():
                    total.add_(part)

    @contextmanager
    def statistics(self, values: Tensor, maxima: Sequence[int]) -> Iterator[Tensor]:
        """A tensor to add a micro-batch's statistics to; `values` then has those of all ranks, on every rank.

        Args:
            maxima: elements that are no sums.
        """
        if self.ranks == 1:
            yield values
            return
        own = torch.zeros_like(values)
        yield own
        rows = distributed.gather(own, self.ranks).unbind()
        largest = [torch.stack([values[i], *(row[i] for row in rows)]).amax() for i in maxima]
        for row in rows:
            values.add_(row)
        for i, value in zip(maxima, largest, strict=True):
            values[i].copy_(value)


def _serving(name: str) -> AbstractContextManager[None]:
    """Marks a collective as one for the module that the parameter belongs to."""
    return graph.in_module(name.rpartition(".")[0])
