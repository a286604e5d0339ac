"""A captured graph: a flat FX graph whose named inputs have roles, and the questions that passes ask of its nodes."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, get_args

import torch
from torch import Tensor, fx, nn

from ...errors import LockstepError
from ..torch_private import trace as torch_trace
from .sizes import Sizes
from .values import Value, value_of

Role = Literal["param", "grad", "buffer", "optimizer", "kv", "user"]
Level = str  # how a program runs: a recording by its name (`config.RECORDINGS`), "captured" or "eager"
Origins = Mapping[fx.Node, frozenset[fx.Node]]  # see `origins`
Static = bool | int | float | str | None
Place = tuple[int, str]  # position and name of an operator's argument
Dynamic = Mapping[str, tuple[str | None, ...]]  # by input: per dimension the name of its open size, None if fixed

BACKWARD_TAG = "remat_pass_tag"  # what torch's own rematerialization passes read, in every version
BACKWARD = "is_backward"
MODULE_TAG = "module"
_NAMESPACES = {  # operator namespaces of this package and of torch
    *("aten", "prims", "lockstep", "higher_order", "_c10d_functional", "c10d", "symm_mem", "inductor"),
    *("inductor_prims", "rngprims", "mkl", "mkldnn"),
}
_MODULES = {"torch", "lockstep", "_operator", "operator", "builtins", "math"}  # root modules of known plain functions
STORED = "lockstep_value"  # metadata key of a loaded graph's nodes: the stored `Value`
_CACHED_VALUE = "lockstep_described"  # metadata key of a traced graph's nodes: (fake value, its `Value`)


class GraphError(LockstepError):
    """A graph cannot be captured, is refused by the verifier, or is launched with inputs it was not captured for."""


@dataclass(frozen=True)
class Inputs:
    """A graph's input tensors by role and name. All but `user` are static: the graph is bound to these very tensors.

    Attributes:
        param: weights. grad: gradient accumulation buffers. buffer: other state, such as statistics or positions.
        optimizer: master weights and moments. kv: the KV cache. user: inputs that differ from launch to launch.
        module: the module that owns `param` and `buffer`; `substitute_inputs` need not swap its tensors.
    """

    param: Mapping[str, Tensor] = field(default_factory=dict)
    grad: Mapping[str, Tensor] = field(default_factory=dict)
    buffer: Mapping[str, Tensor] = field(default_factory=dict)
    optimizer: Mapping[str, Tensor] = field(default_factory=dict)
    kv: Mapping[str, Tensor] = field(default_factory=dict)
    user: Mapping[str, Tensor] = field(default_factory=dict)
    module: nn.Module | None = None

    def flat(self) -> Iterator[tuple[Role, str, Tensor]]:
        for role in get_args(Role):
            for name, tensor in getattr(self, role).items():
                yield role, name, tensor

    def tensors(self) -> list[Tensor]:
        return [tensor for _, _, tensor in self.flat()]

    def with_tensors(self, tensors: Iterable[Tensor]) -> Inputs:
        source = iter(tensors)
        other = {role: {name: next(source) for name in getattr(self, role)} for role in get_args(Role)}
        return replace(self, **other, module=None)

    def specs(self, dynamic: Dynamic) -> tuple[InputSpec, ...]:
        """The specs of the inputs, in the order of `flat`, with open sizes by name; see `InputSpec.of`."""
        return tuple(InputSpec.of(role, name, tensor, dynamic.get(name, ())) for role, name, tensor in self.flat())

    def open_sizes(self, specs: Sequence[InputSpec]) -> dict[str, int]:
        """The values of the open sizes of `specs` in these inputs. `GraphError`: two inputs disagree about a size."""
        sizes: dict[str, int] = {}
        for spec, tensor in zip(specs, self.tensors(), strict=True):
            for size, value in zip(spec.shape, tensor.shape, strict=True):
                if isinstance(size, str) and sizes.setdefault(size, value) != value:
                    raise GraphError(f"size {size} of {spec} is {value}, that of an input before it {sizes[size]}")
        return sizes


@dataclass(frozen=True)
class InputSpec:
    """What an input tensor must be. In `shape` an open size is its name; a tensor with open sizes is contiguous."""

    role: Role
    name: str
    shape: tuple[int | str, ...]
    stride: tuple[int, ...] | None
    dtype: torch.dtype
    device: torch.device

    @staticmethod
    def of(role: Role, name: str, tensor: Tensor, sizes: Sequence[str | None] = ()) -> InputSpec:
        """The spec of a tensor. `sizes`: per dimension the name of its open size, None if fixed. Sizes 0 and 1 are
        always fixed, since they broadcast differently."""
        named = sizes or [None] * tensor.dim()
        shape = tuple(n if n and value > 1 else value for value, n in zip(tensor.shape, named, strict=True))
        stride = None if any(isinstance(size, str) for size in shape) else tensor.stride()
        return InputSpec(role, name, shape, stride, tensor.dtype, tensor.device)

    @property
    def sizes(self) -> tuple[str | None, ...]:
        return tuple(size if isinstance(size, str) else None for size in self.shape)

    def mismatch(self, tensor: Tensor) -> str | None:
        """How `tensor` differs from this spec, as a message, or None."""
        shape, stride = tuple(tensor.shape), tensor.stride()
        if (shape, stride, tensor.dtype, tensor.device) == (self.shape, self.stride, self.dtype, self.device):
            return None  # the fast path of almost every launch
        expected: tuple[int | str, ...] = self.shape
        if self.stride is None and len(shape) == len(expected):
            if not tensor.is_contiguous():
                return f"{self} has open sizes and must be contiguous; its stride is {stride}"
            expected = tuple(h if isinstance(want, str) else want for h, want in zip(shape, expected, strict=True))
        for aspect, have, want in (
            ("shape", shape, expected),
            ("dtype", tensor.dtype, self.dtype),
            ("device", tensor.device, self.device),
            ("stride", stride, self.stride or stride),
        ):
            if have != want:
                return f"{self} has {aspect} {have}, the graph was captured for {want}"
        return None

    @property
    def title(self) -> str:
        return f"{self.role} {self.name}"

    def __str__(self) -> str:
        return f"{self.role} {self.name!r}"


@dataclass(frozen=True)
class Captured:
    """A flat `torch.fx` graph and its signature.

    Attributes:
        module: has one placeholder per input, in order; returns a list of tensors, one per output.
        statics: the Python values that the graph was traced with and holds as constants.
        writes: roles whose tensors the graph may write in place.
        recorded: whether it runs as a CUDA graph.
        split_at: operators (`namespace.name`) that run between recorded pieces; empty if the graph is recorded whole.
        sizes: the open sizes of the inputs. Nodes that compute with them return Python numbers.
        log: one line per pass that ran; a way to capture may add a first one.
        before: the graph before the last pass, while it is kept.
    """

    name: str
    module: fx.GraphModule
    inputs: tuple[InputSpec, ...]
    outputs: tuple[str, ...]
    statics: Mapping[str, Static]
    writes: frozenset[Role]
    recorded: bool = False
    split_at: frozenset[str] = frozenset()
    sizes: Sizes = field(default_factory=Sizes)
    log: tuple[str, ...] = ()
    before: Captured | None = field(default=None, repr=False, compare=False)

    @property
    def graph(self) -> fx.Graph:
        return self.module.graph

    @property
    def title(self) -> str:
        return title_of(self.name, self.statics)

    def value(self, node: fx.Node) -> Value:
        """What a node computes, from the stored graph or from the trace."""
        if STORED in node.meta:
            return node.meta[STORED]
        recorded = torch_trace.fake_value(node)
        known = node.meta.get(_CACHED_VALUE)
        if known is None or known[0] is not recorded:  # cached, as every pass and check asks this of every node
            known = node.meta[_CACHED_VALUE] = recorded, value_of(recorded, self.sizes)
        return known[1]

    @cached_property
    def written_inputs(self) -> frozenset[int]:
        """Indices of the inputs that the graph writes in place."""
        number = {node: i for i, (node, _) in enumerate(self.placeholders())}
        origins_of = origins(self.graph)
        written = [o for node in self.graph.nodes for o in written_memory(node, origins_of)]
        return frozenset(number[origin] for origin in written if origin in number)

    def stages(self) -> list[tuple[str, Captured]]:
        """The graph as captured and after each pass, oldest first, as far as they were kept. A loaded graph begins with
        the stage that was stored, named "storage"."""
        found = [self]
        while found[-1].before is not None:
            found.append(found[-1].before)
        names = ["capture", *(line.partition(":")[0] for line in self.log)][-len(found) :]
        if names[0] != "capture":
            names[0] = "storage"
        return list(zip(names, reversed(found), strict=True))

    def placeholders(self) -> list[tuple[fx.Node, InputSpec]]:
        return list(zip(self.graph.find_nodes(op="placeholder"), self.inputs, strict=True))


def title_of(name: str, statics: Mapping[str, Static]) -> str:
    return f"{name}({', '.join(f'{k}={v}' for k, v in statics.items())})"


def is_exact(node: fx.Node) -> bool:
    """Whether a call is bitwise equal to eager; a compiled region need not be."""
    return getattr(node.target, "exact", True)


def inexact_results(captured: Captured) -> frozenset[str]:
    """Outputs ("output NAME") and written inputs ("ROLE NAME") that depend on a call that is not exact."""
    if all(map(is_exact, captured.graph.nodes)):
        return frozenset()
    origins_of = origins(captured.graph)
    found: set[fx.Node] = set()
    for node in captured.graph.nodes:
        sources = {source for a in node.all_input_nodes for source in (a, *origins_of[a])}
        if node.op == "call_function" and not (is_exact(node) and sources.isdisjoint(found)):
            found |= {node, *written_memory(node, origins_of)}
    results: Any = captured.graph.output_node().args[0]
    outputs = zip(captured.outputs, results, strict=True)
    names = {f"output {name}" for name, node in outputs if not found.isdisjoint({node, *origins_of[node]})}
    return frozenset(names | {spec.title for node, spec in captured.placeholders() if node in found})


def op_name(node: fx.Node) -> str:
    """`namespace.operator` of an operator call, without the overload; a function's name; else the node's `op`."""
    if torch_trace.is_operator(node.target):
        return torch_trace.operator_name(node.target)
    return getattr(node.target, "__name__", node.op) if node.op == "call_function" else node.op


def can_record_without_launch(captured: Captured) -> bool:
    """Whether a CUDA graph can be recorded without a launch before, once the package's kernels are loaded: there are no
    compiled regions or foreign operators, whose first call may compile or autotune, and no calls between pieces."""
    return not captured.split_at and all(map(is_exact, captured.graph.nodes)) and not foreign_calls(captured)


def foreign_calls(captured: Captured) -> set[str]:
    """Operators and functions that the graph calls from outside this package, torch and Python."""
    found = set()
    for target in (node.target for node in captured.graph.nodes if node.op == "call_function"):
        if torch_trace.is_operator(target):
            name, known = torch_trace.operator_name(target), _NAMESPACES
        else:
            module = getattr(target, "__module__", None) or type(target).__module__
            name, known = f"{module}.{getattr(target, '__name__', type(target).__name__)}", _MODULES
        if name.partition(".")[0] not in known:
            found.add(name)
    return found


def is_backward(node: fx.Node) -> bool:
    """Whether the node was traced within `capture.step.backward`."""
    return torch_trace.tags(node).get(BACKWARD_TAG) == BACKWARD


def module_of(node: fx.Node) -> str:
    """The path of the innermost module whose forward made the node; empty outside any module."""
    return torch_trace.tags(node).get(MODULE_TAG, "")


def describe(node: fx.Node) -> str:
    """A node for a message: its name, operator and module."""
    module = f" of {module_of(node)}" if module_of(node) else ""
    return f"node {node.name} ({op_name(node)}){module}"


def written_arguments(node: fx.Node) -> list[fx.Node]:
    """The arguments that a call writes in place."""
    return _nodes_passed_for(node, _written_places)


def written_memory(node: fx.Node, origins_of: Origins) -> list[fx.Node]:
    """The nodes that own the memory that a call writes in place; see `origins`."""
    return [origin for argument in written_arguments(node) for origin in origins_of[argument]]


def mutates(node: fx.Node) -> bool:
    return bool(written_arguments(node))


def has_side_effects(node: fx.Node) -> bool:
    """Whether a call has side effects, so it must stay even if nothing reads its results: it writes in place, draws
    from torch's random state, or returns nothing, such as an assertion."""
    if not torch_trace.is_operator(node.target):
        return False
    random = torch.Tag.nondeterministic_seeded in node.target.tags  # type: ignore[union-attr]
    return mutates(node) or random or not torch_trace.results(node.target)


# Their schemas declare a fresh result, but the result aliases the argument.
_UNDECLARED_VIEWS = {"aten._unsafe_view", "aten.lift_fresh", "_c10d_functional.wait_tensor"}


def aliased_arguments(node: fx.Node) -> list[fx.Node]:
    """The arguments that a call's result aliases."""
    if node.target is operator.getitem:
        return [node.args[0]]  # type: ignore[list-item]
    if op_name(node) in _UNDECLARED_VIEWS:
        return list(node.all_input_nodes[:1])
    return _nodes_passed_for(node, _viewed_places)


def origins(graph: fx.Graph) -> Origins:
    """For each node, the nodes that own the memory of its result: placeholders, constants, or calls that allocate."""
    found: dict[fx.Node, frozenset[fx.Node]] = {}
    for node in graph.nodes:
        sources = aliased_arguments(node) if node.op == "call_function" else []
        found[node] = frozenset().union(*(found[s] for s in sources)) if sources else frozenset((node,))
    return found


@functools.cache
def _written_places(op: Any) -> tuple[Place, ...]:
    """The arguments that an operator writes."""
    return tuple((i, a.name) for i, a in enumerate(torch_trace.arguments(op)) if a.is_write)


@functools.cache
def _viewed_places(op: Any) -> tuple[Place, ...]:
    """The arguments that an operator's results alias."""
    shared = frozenset().union(*(result.aliases for result in torch_trace.results(op)))
    return tuple((i, a.name) for i, a in enumerate(torch_trace.arguments(op)) if a.aliases & shared)


def _nodes_passed_for(node: fx.Node, places: Callable[[Any], tuple[Place, ...]]) -> list[fx.Node]:
    """The nodes that a call passes for the arguments that `places` gives for its operator."""
    if node.op != "call_function" or not torch_trace.is_operator(node.target):
        return []
    found: list[fx.Node] = []
    for i, name in places(node.target):
        value = node.args[i] if i < len(node.args) else node.kwargs.get(name)
        found += [v for v in (value if isinstance(value, (list, tuple)) else [value]) if isinstance(v, fx.Node)]
    return found
