"""Passes: named rewrites of captured graphs, applied in order, with the verifier after each."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from ...config import CompileConfig
from ...errors import LockstepError
from ...user_functions import failing_line, load_function, one_line
from ..ir.captured import Captured, GraphError, inexact_results, op_name
from ..ir.text import digest
from ..ir.verify import verify
from .bucket import bucket
from .canonicalize import canonicalize
from .fuse import fuse
from .recompute import fit, keep_logits, recompute, saved_bytes
from .reorder import reorder
from .reshard import reshard

_SIGNATURE = "name", "statics", "inputs", "outputs", "writes"  # fields of `Captured` that a pass must not change


@dataclass(frozen=True)
class Pass:
    """A rewrite with its options bound.

    Attributes:
        preserves_numerics: no bit of any output or write changes. Otherwise `captured.is_exact` is false for the calls
            that the pass inserts, and the check against eager holds what depends on them to a bound.
        options: what the pass was made with, by name: passes of equal name and options do the same to a graph.
        apply: does not change its argument; returns the new graph and a short note on what it did.
    """

    name: str
    preserves_numerics: bool
    apply: Callable[[Captured], tuple[Captured, str]]
    options: Mapping[str, Any] = field(default_factory=dict)


def pipeline(config: CompileConfig, sharded: bool = False, on_gpu: bool = False) -> list[Pass]:
    """The passes of `config.passes` that the rest of the configuration enables, in order. `sharded`: graphs have
    collectives. `InputError`: a user's function cannot be found."""
    c, budget, patterns = config, int(config.activation_memory_gib * 2**30), config.recompute_patterns
    shipped = {
        "canonicalize": _make_pass("canonicalize", canonicalize) if c.canonicalize else None,
        "keep_logits": _make_pass("keep_logits", keep_logits) if c.keeps_logits else None,
        "recompute": _make_pass("recompute", recompute, patterns=patterns) if patterns else None,
        "fit": _make_pass("fit", fit, budget=budget) if c.activation_memory_gib > 0 else None,
        "reshard": _make_pass("reshard", reshard) if sharded and c.reshard_after_forward else None,
        "bucket": _make_pass("bucket", bucket) if sharded and c.bucket_collectives else None,
        "reorder": _make_pass("reorder", reorder) if sharded and c.reorder_collectives else None,
        "fuse": _make_pass("fuse", fuse) if on_gpu else None,
    }
    for spec in [name for name in c.pass_names if name not in shipped]:  # the user's
        own = partial(_call_users_pass, load_function(spec, f"compile.passes {spec!r}"), spec)
        shipped[spec] = Pass(spec.rpartition(":")[2], True, own)
    return [p for name in c.pass_names if (p := shipped[name]) is not None]


def cudagraph_pass(split_at: Collection[str] = ()) -> Pass:
    """The pass that marks a graph to be recorded as a CUDA graph, in pieces around calls of `split_at` if it has any;
    from then on the verifier also checks that it can be recorded."""
    return _make_pass("cudagraph", _mark_recorded, split_at=tuple(sorted(split_at)))


def _mark_recorded(captured: Captured, split_at: Collection[str]) -> tuple[Captured, str]:
    static = sum(spec.role != "user" for spec in captured.inputs)
    copied = f"{static} static inputs, {len(captured.inputs) - static} copied in"
    between = [op_name(node) for node in captured.graph.nodes if op_name(node) in split_at]
    way = f"in pieces around {len(between)} calls of {', '.join(sorted(set(between)))}" if between else "whole"
    return replace(captured, recorded=True, split_at=frozenset(between)), f"{way}; {copied}"


def _make_pass(name: str, rewrite: Callable[..., tuple[Captured, str]], **options: Any) -> Pass:
    return Pass(name, True, partial(rewrite, **options), options)


def _call_users_pass(function: Callable[[Captured], Any], spec: str, captured: Captured) -> Any:
    before = digest(captured)
    try:
        found = function(captured)
    except LockstepError:
        raise
    except Exception as error:
        said = f"{type(error).__name__}: {one_line(error)}{failing_line(error)}"
        raise GraphError(f"{captured.title}: compile.passes {spec!r} raised {said}") from error
    if digest(captured) != before:
        raise GraphError(
            f"{captured.title}: compile.passes {spec!r} changes the graph that it is given; a pass changes a copy, as "
            "lockstep.graph.passes.rewrite.rewritten makes one"
        )
    return found


def _compile(captured: Captured, name: str) -> None:
    try:
        captured.graph.lint()
    except RuntimeError as error:
        raise GraphError(f"{captured.title}: {name} returned a graph that cannot run: {error}") from error
    captured.module.recompile()


def run_passes(captured: Captured, passes: Sequence[Pass], check: Callable[[Captured], Captured] = verify) -> Captured:
    """Apply `passes` in order, with `check` before the first and after each. `GraphError`: the check fails, or a pass
    changes numerics without announcing it or the graph's signature, returns a graph that cannot run, or was requested
    and matches nothing."""
    check(captured)
    for p in passes:
        before = captured
        found = p.apply(before)
        if not (isinstance(found, tuple) and len(found) == 2 and isinstance(found[0], Captured)):
            raise GraphError(f"{p.name} returned a {type(found).__name__}; a pass returns the new graph and a note")
        captured, note = found
        if changed := [name for name in _SIGNATURE if getattr(captured, name) != getattr(before, name)]:
            raise GraphError(f"{before.title}: {p.name} changes the graph's {changed[0]}; a pass keeps its signature")
        if captured is not before:
            _compile(captured, p.name)
        if p.preserves_numerics and (new := inexact_results(captured) - inexact_results(before)):
            raise GraphError(f"{captured.title}: {p.name} says that it changes no bits, and may change {min(new)}")
        line = f"{p.name}: {len(before.graph.nodes)} -> {len(captured.graph.nodes)} nodes; {note}"
        captured = check(replace(captured, log=(*captured.log, line), before=before))
    return captured
