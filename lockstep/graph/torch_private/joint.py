"""Partitions forward and backward pass with AOTAutograd. Uses private interfaces of torch 2.11 to 2.13."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, fx, nn

from .trace import Untraceable


class _Function(nn.Module):
    """A function as a module whose parameters are its leaves, since the export differentiates only parameters."""

    def __init__(self, fn: Callable[..., Sequence[Tensor]], tensors: Sequence[Tensor], leaves: Collection[int]) -> None:
        super().__init__()
        self.results = 0
        self._fn, self.order = fn, [*leaves, *(i for i in range(len(tensors)) if i not in leaves)]
        for i in leaves:
            self.register_parameter(f"leaf{i}", nn.Parameter(tensors[i].detach()))

    def forward(self, *others: Tensor) -> tuple[Tensor, ...]:
        values = dict(zip(self.order, [*self.parameters(), *others], strict=True))
        found = tuple(self._fn(*(values[i] for i in sorted(values))))
        self.results = len(found)
        return found


def partition(
    fn: Callable[..., Sequence[Tensor]], fakes: Sequence[Tensor], leaves: Sequence[int]
) -> tuple[fx.GraphModule, fx.GraphModule, int]:
    """`fn(*fakes)` and its gradients, split by the min-cut partitioner, which recomputes what is cheap; for use within
    `trace`.

    Args:
        fn: writes none of its arguments; its first result is differentiated, the others have no gradient.
        leaves: indices of the arguments to differentiate by.

    Returns:
        The forward graph, from inputs to results followed by saved values; the backward graph, from saved values (named
        as in the forward graph) and the gradient of the first result to the leaves' gradients; the number of results.

    Raises:
        Untraceable: there is not exactly one forward and one backward graph.
    """
    from torch._functorch.aot_autograd import (
        aot_compile_joint_with_descriptors,
        aot_export_joint_with_descriptors,
        make_boxed_func,
    )
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    halves: dict[str, list[fx.GraphModule]] = {"forward": [], "backward": []}

    def collect(half: str) -> Any:
        def compiler(module: fx.GraphModule, _: Any) -> Callable[..., Any]:
            halves[half].append(module)
            return make_boxed_func(module.forward)

        return compiler

    module = _Function(fn, fakes, leaves)
    with torch.enable_grad(), ExitStack() as stack:
        others = tuple(fake for i, fake in enumerate(fakes) if i not in leaves)
        joint = aot_export_joint_with_descriptors(stack, module, others, decompositions={})
        aot_compile_joint_with_descriptors(
            joint,
            partition_fn=min_cut_rematerialization_partition,
            fw_compiler=collect("forward"),
            bw_compiler=collect("backward"),
        )
    if [len(found) for found in halves.values()] != [1, 1]:
        raise Untraceable("forward and backward pass are not one graph each")
    return _sort_placeholders(halves["forward"][0], module.order), halves["backward"][0], module.results


def _sort_placeholders(module: fx.GraphModule, order: Sequence[int]) -> fx.GraphModule:
    """The graph with its placeholders sorted; the i-th is that of argument `order[i]`."""
    placeholders = module.graph.find_nodes(op="placeholder")
    if len(placeholders) != len(order):
        raise Untraceable(f"the forward pass has {len(placeholders)} inputs for {len(order)} tensors")
    first = placeholders[0].prev
    for _, node in sorted(zip(order, placeholders, strict=True), key=lambda pair: pair[0], reverse=True):
        first.append(node)
    module.recompile()
    return module
