"""Compiles stretches of graphs with Inductor. Uses private interfaces of torch 2.11 to 2.13."""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from ..ir.sizes import Condition, Expression, expression
from .trace import ONE_AT_A_TIME

# Round intermediates as the operators do, and choose kernels without autotuning.
_OPTIONS = {"emulate_precision_casts": True, "deterministic": True}


class Uncompilable(Exception):
    """An open size was specialized to a number, or strides are not a function of the sizes."""


class Signature:
    """The inputs of a stretch (fake tensors and open sizes) in a form that does not depend on the trace: each distinct
    open size is named by its order, so that stretches of different traces can be the same function. `sizes` maps the
    names to the trace's expressions."""

    def __init__(self, values: Sequence[Any]) -> None:
        self._values = values
        dims = [d for value in values for d in (value.shape if isinstance(value, Tensor) else [value])]
        found = dict.fromkeys(d.node.expr for d in dims if isinstance(d, torch.SymInt))
        self.sizes: dict[str, Any] = {f"d{i}": e for i, e in enumerate(found)}
        self._hints = {d.node.expr: d.node.hint for d in dims if isinstance(d, torch.SymInt)}

    def describe(self) -> list[str]:
        """The inputs as text. Raises `Uncompilable`: a stride is not a function of the sizes."""
        import sympy  # type: ignore[import-untyped]

        names = {name: sympy.Symbol(name) for name in self.sizes}

        def text(size: Any) -> str:
            return str(self._in(size, names))

        return [
            f"{v.dtype} {list(map(text, v.shape))} {list(map(text, v.stride()))} {v.device.type}"
            if isinstance(v, Tensor)
            else text(v)
            for v in self._values
        ]

    def _in(self, size: int | torch.SymInt, symbols: dict[str, Any]) -> Any:
        """A size or stride with the names replaced by `symbols`."""
        if isinstance(size, int):
            return size
        found = size.node.expr.xreplace({e: symbols[name] for name, e in self.sizes.items()})
        if not found.free_symbols <= set(symbols.values()):
            raise Uncompilable(f"stride {size} of an input is no function of the sizes")
        return found

    def compile(self, module: fx.GraphModule) -> tuple[Any, list[Condition]]:
        """Compile `module`, a function of such inputs, with open sizes. Returns the artifact and the conditions on its
        sizes. Raises `Uncompilable`."""
        from torch._inductor.standalone_compile import standalone_compile
        from torch.fx.experimental.symbolic_shapes import ShapeEnv

        env = ShapeEnv()
        mode = FakeTensorMode(shape_env=env)
        with ONE_AT_A_TIME, torch.inference_mode(False), torch.no_grad(), tracing(TracingContext(mode)):
            symbols, inputs = self._fakes(env, mode)
            with mode:
                flat = make_fx(lambda *values: module.forward(*values))(*inputs)
            options = {"config_patches": _OPTIONS}
            artifact = standalone_compile(
                flat, inputs, dynamic_shapes="from_tracing_context", options=options, aot=True
            )
        names = {symbol: name for name, symbol in symbols.items()}
        if taken := [names[symbol] for symbol in env.replacements if symbol in names]:
            raise Uncompilable(f"a number was taken for size {', '.join(taken)}")
        try:
            conditions = [(expression(guard.expr, names), "Inductor") for guard in env.guards]
        except KeyError as unknown:
            raise Uncompilable(f"a condition on sizes has {unknown}") from unknown
        composed: list[Expression] = [[">=", name, 2] for name, e in self.sizes.items() if not e.is_Symbol]
        return artifact, conditions + [(condition, "Inductor") for condition in composed]

    def _fakes(self, env: Any, mode: FakeTensorMode) -> tuple[dict[str, Any], list[Any]]:
        """Symbols by name, and fake inputs whose sizes are expressions in them."""
        from torch._dynamo.source import ConstantSource
        from torch.fx.experimental.symbolic_shapes import DimDynamic

        symbols, sources = {}, {name: ConstantSource(name) for name in self.sizes}
        for name, e in self.sizes.items():
            symbols[name] = env.create_symbol(self._hints[e], sources[name], dynamic_dim=DimDynamic.DYNAMIC)
        if fixed := [name for name, symbol in symbols.items() if not symbol.is_Symbol]:
            raise Uncompilable(f"size {', '.join(fixed)} was 0 or 1")
        hints = {symbols[name]: self._hints[e] for name, e in self.sizes.items()}

        def size(found: int | torch.SymInt) -> Any:
            e = self._in(found, symbols)
            return e if isinstance(e, int) else env.create_symintnode(e, hint=int(e.xreplace(hints)))

        with mode:
            return symbols, [
                torch.empty_strided(
                    [size(d) for d in v.shape], [size(d) for d in v.stride()], dtype=v.dtype, device=v.device
                )
                if isinstance(v, Tensor)
                else size(v)
                for v in self._values
            ]


def compile_module(module: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
    """Compile a module that Dynamo captured, forward and backward. Inputs are indexed before the compiled call: with an
    open index, as of a layer's KV cache, Inductor loses the offset if an operator writes the element (torch 2.13)."""
    from torch._inductor.compile_fx import compile_fx

    before, after, values = _split_indexing(module, inputs)
    compiled: Any = compile_fx(after, values, config_patches=_OPTIONS)
    return lambda *arguments: compiled(*before(*arguments))


def _split_indexing(
    module: fx.GraphModule, inputs: Sequence[Any]
) -> tuple[fx.GraphModule, fx.GraphModule, Sequence[Any]]:
    """Split a module into one that indexes its inputs and one that does the rest. Returns both, and the inputs of the
    second."""
    placeholders = module.graph.find_nodes(op="placeholder")
    given, first = dict(zip(placeholders, inputs, strict=True)), fx.Graph()
    copies = {node: first.placeholder(node.name) for node in placeholders}
    for node in module.graph.nodes:
        if _is_indexing(node) and all(source in copies for source in node.all_input_nodes):
            copies[node] = first.node_copy(node, copies.__getitem__)
            given[node] = node.meta["example_value"]
    others = [node for node in module.graph.nodes if node not in copies]
    read = {source for node in others for source in node.all_input_nodes}
    passed = [node for node, value in given.items() if node in read or not isinstance(value, Tensor)]
    first.output(tuple(copies[node] for node in passed))
    graph = fx.Graph()
    rest = {node: graph.placeholder(node.name) for node in passed}
    for node in others:
        rest[node] = graph.node_copy(node, rest.__getitem__)
    return fx.GraphModule(module, first), fx.GraphModule(module, graph), [given[node] for node in passed]


def _is_indexing(node: fx.Node) -> bool:
    """Whether a call indexes a tensor with an integer, or squeezes it."""
    if node.target not in (operator.getitem, torch.select):
        return node.op == "call_method" and node.target == "squeeze"
    index = node.args[-1]
    value = index.meta.get("example_value") if isinstance(index, fx.Node) else index
    return isinstance(value, (int, torch.SymInt)) and isinstance(node.meta.get("example_value"), Tensor)


def settings() -> dict[str, Any]:
    """What compiled code depends on besides its operators, by name. CPU code is specialized to the number of threads,
    which determines how sums are split."""
    from torch._inductor import config

    found = sorted((name, repr(value)) for name, value in config.save_config_portable().items())
    return {"threads": torch.get_num_threads(), "inductor": hashlib.sha256(repr(found).encode()).hexdigest()}


def load(data: bytes) -> Any:
    """Load an artifact from the bytes of its `serialize`; this runs code."""
    from torch._inductor.standalone_compile import AOTCompiledArtifact

    return AOTCompiledArtifact.deserialize(data)


def is_fake(value: Any) -> bool:
    return isinstance(value, torch._subclasses.FakeTensor)


def missing_compiler(device: torch.device) -> str | None:
    """What Inductor lacks to compile for a device; None if nothing."""
    if device.type != "cpu":
        from torch.utils._triton import has_triton

        return None if has_triton() else "Triton"
    from torch._inductor.cpp_builder import get_cpp_compiler

    try:
        get_cpp_compiler()
    except Exception:  # the exception class has moved between versions of torch
        return "a C++ compiler such as g++"
    return None
