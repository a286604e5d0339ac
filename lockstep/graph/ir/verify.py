"""What must hold for every captured graph, and additionally for one that is recorded as a CUDA graph."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, fx

from ...types import COMPARED_OUTPUTS
from ..torch_private import trace as torch_trace
from .captured import Captured, GraphError, Origins, describe, is_backward, op_name, origins, written_memory
from .cross_rank_sums import CrossRankSums, communicates
from .values import TensorValue, tensors_in

MAX_PROBLEMS = 8

# torch operators that the forward pass must not use, and the operator of ours with fixed bits that replaces each.
_REPLACEMENTS = {
    **dict.fromkeys(("aten.mm", "aten.addmm", "aten.mv", "aten.addmv", "aten.dot", "aten.linear"), "ops.linear"),
    **dict.fromkeys(("aten.matmul", "aten._scaled_mm", "aten._grouped_mm", "aten.convolution"), "ops.linear"),
    **dict.fromkeys(("aten.bmm", "aten.baddbmm", "aten.addbmm"), "ops.attention_packed or ops.attention_paged"),
    **dict.fromkeys(("aten._softmax", "aten._safe_softmax"), "ops.attention_packed or ops.attention_paged"),
    **dict.fromkeys(("aten._log_softmax", "aten.logsumexp"), "ops.token_logprobs"),
    **dict.fromkeys(("aten.mean", "aten.native_layer_norm", "aten._fused_rms_norm"), "ops.rms_norm"),
    **dict.fromkeys(("aten.silu", "aten.silu_"), "ops.silu_mul"),
    **dict.fromkeys(("aten.argmax", "aten.multinomial"), "ops.sample"),
    "aten.embedding": "ops.gather_rows",
}
_ATTENTION = "aten._scaled_dot_product"

# Operators that must not depend on floats summed across ranks: the order of that sum varies with the number of ranks.
_DECISIONS = {
    **dict.fromkeys(("lockstep.token_logprobs", "lockstep.score_logits"), "log-probabilities follow"),
    "lockstep.route": "a choice of experts follows",
    **dict.fromkeys(("lockstep.sample", "lockstep.sample_logits"), "a sampled token follows"),
    "lockstep.decode_advance": "what a token is recorded with follows",
}


def verify(captured: Captured) -> Captured:
    """Return `captured` if it is sound. `GraphError`: names each node at fault and what would be right."""
    origins_of = origins(captured.graph)
    problems = [*_signature(captured), *_outputs(captured, origins_of)]
    if not problems:  # the other checks rely on a sound signature
        problems = [*_constants(captured), *_numerics(captured), *_sums_of_ranks(captured, origins_of)]
        problems += _writes(captured, origins_of)
        problems += _recordable(captured) if captured.recorded else []
    if problems:
        shown = "\n  ".join(problems[:MAX_PROBLEMS])
        more = f"\n  and {len(problems) - MAX_PROBLEMS} more" if len(problems) > MAX_PROBLEMS else ""
        raise GraphError(f"{captured.title}: the captured graph is refused\n  {shown}{more}")
    return captured


def _signature(captured: Captured) -> Iterator[str]:
    """Every input matches its spec, and all other nodes are operator calls."""
    if (count := len(captured.graph.find_nodes(op="placeholder"))) != len(captured.inputs):
        yield f"the graph has {count} inputs, its signature names {len(captured.inputs)}"
        return
    for node, spec in captured.placeholders():
        value = captured.value(node)
        if not isinstance(value, TensorValue):
            yield f"node {node.name}: {spec} has no recorded shape"
            continue
        if (value.shape, value.dtype, value.device) != (spec.shape, spec.dtype, spec.device):
            found = f"{value.dtype} {list(value.shape)} on {value.device}"
            yield f"node {node.name}: {spec} is {found}, its signature says otherwise"
    for node in captured.graph.nodes:
        if node.op in ("call_module", "call_method"):
            yield f"{describe(node)} is not an operator; a flat graph has only operators"


def _outputs(captured: Captured, origins_of: Origins) -> Iterator[str]:
    values = captured.graph.output_node().args[0]
    if not isinstance(values, (list, tuple)) or len(values) != len(captured.outputs):
        yield f"the graph returns {values!r}, its signature names {len(captured.outputs)} outputs"
        return
    for name, value in zip(captured.outputs, values, strict=True):
        if not isinstance(value, fx.Node) or not isinstance(captured.value(value), TensorValue):
            yield f"output {name!r} is {value!r}; an output must be a tensor that the graph computes"
        elif any(o.op == "placeholder" for o in origins_of[value]):
            yield f"output {name!r} is node {value.name}, a view of an input; return a copy, or let the caller read it"


def _constants(captured: Captured) -> Iterator[str]:
    for node in captured.graph.nodes:
        if node.op == "get_attr":
            users = ", ".join(u.name for u in node.users)
            yield (
                f"node {node.name} ({node.target}), used by {users}: a tensor from outside became a constant of the "
                "graph; pass it as an input"
            )


def _numerics(captured: Captured) -> Iterator[str]:
    for node in captured.graph.nodes:
        name = op_name(node)
        due = "ops.attention_packed or ops.attention_paged" if name.startswith(_ATTENTION) else _REPLACEMENTS.get(name)
        if due and not is_backward(node):
            yield f"{describe(node)}: the forward pass must use {due}, whose bits are fixed"


def _sums_of_ranks(captured: Captured, origins_of: Origins) -> Iterator[str]:
    """No compared output, call in `_DECISIONS` or write to the KV cache depends on floats summed across ranks."""
    if not any(map(communicates, captured.graph.nodes)):
        return
    specs, cross_rank = dict(captured.placeholders()), CrossRankSums(captured, origins_of)
    sums: dict[fx.Node, fx.Node] = {}  # nodes that depend on a cross-rank sum, and memory that holds one: that sum

    def sum_in(node: fx.Node) -> fx.Node | None:
        return sums.get(node) or next((sums[o] for o in origins_of[node] if o in sums), None)

    for node in captured.graph.nodes:
        adds = cross_rank.sums_across_ranks(node)
        found = next(filter(None, map(sum_in, node.all_input_nodes)), node if adds else None)
        if found is None or node.op == "output":
            continue
        sums[node] = found
        written = written_memory(node, origins_of)
        sums |= dict.fromkeys(written, found)
        cached = [specs[o] for o in written if o in specs and specs[o].role == "kv"]
        why = _DECISIONS.get(op_name(node)) or (f"{cached[0]} is written" if cached else "")
        if why and not is_backward(node):
            yield _sum_problem(found, f"{why} from it in {describe(node)}")
    returned = zip(captured.outputs, captured.graph.output_node().args[0], strict=True)  # type: ignore[arg-type]
    for name, value in returned:
        if name in COMPARED_OUTPUTS and (found := sum_in(value)):
            yield _sum_problem(found, f"output {name!r} follows from it")


def _sum_problem(found: fx.Node, what: str) -> str:
    adds = f"{describe(found)} adds floats of several ranks"
    return f"{adds}, and {what}; all-gather finished values and concatenate them instead"


def _writes(captured: Captured, origins_of: Origins) -> Iterator[str]:
    """In-place writes reach only memory that the graph allocated and inputs of the declared roles."""
    specs = dict(captured.placeholders())
    for node in captured.graph.nodes:
        for origin in written_memory(node, origins_of):
            if origin in specs and specs[origin].role not in captured.writes:
                allowed = ", ".join(sorted(captured.writes)) or "none"
                yield f"{describe(node)} writes {specs[origin]} in place; roles it may write: {allowed}"
            elif origin.op == "get_attr":
                yield f"{describe(node)} writes the constant {origin.target} in place"


def overlapping(captured: Captured, tensors: Sequence[Tensor]) -> str | None:
    """The first input that the graph writes and that overlaps another in memory, as a sentence; None if there is none.
    Passes assume that inputs do not alias: they may move a read of one past a write to another."""
    spans = sorted(
        (t.data_ptr(), t.data_ptr() + t.nbytes, i in captured.written_inputs, str(captured.inputs[i]))
        for i, t in enumerate(tensors)
        if t.numel() and t.is_contiguous()
    )
    reach: list[tuple[int, int, bool, str]] = []  # earlier spans that may reach into this one
    for span in spans:
        reach = [earlier for earlier in reach if earlier[1] > span[0]]
        for earlier in reach:
            if span[2] or earlier[2]:
                both = (earlier, span) if earlier[2] else (span, earlier)
                return f"{both[0][3]} is written in place and shares memory with {both[1][3]}; pass the memory once"
        reach.append(span)
    return None


def _recordable(captured: Captured) -> Iterator[str]:
    """Calls that a CUDA graph cannot hold: they sync with the device, use random state, or run on another device."""
    home = captured.inputs[0].device if captured.inputs else None
    for node in captured.graph.nodes:
        if away := {str(t.device) for t in tensors_in(captured.value(node)) if t.device != home}:
            yield f"{describe(node)} lies on {', '.join(away)}, the first input on {home}"
        if op_name(node) in captured.split_at:
            continue  # runs between recorded pieces
        if reason := _why_not_recordable(captured, node):
            yield f"{describe(node)} cannot be part of a CUDA graph: {reason}"


def _why_not_recordable(captured: Captured, node: fx.Node) -> str | None:
    """Why a call makes the host wait for the device, or cannot be replayed; None if it may be recorded."""
    if not torch_trace.is_operator(node.target):
        return None
    tags = node.target.tags  # type: ignore[union-attr]
    if torch.Tag.cudagraph_unsafe in tags:
        return "it is tagged cudagraph_unsafe"
    if torch.Tag.data_dependent_output in tags or op_name(node) == "aten._local_scalar_dense":
        return "it brings a value to the host"
    if torch.Tag.dynamic_output_shape in tags and not _is_index(node):
        return "the size of its result depends on values, so the host must read it"
    if torch.Tag.nondeterministic_seeded in tags:
        return "it draws from torch's global random state, which a replay would repeat"
    indices = [t for n in node.all_input_nodes[1:] for t in tensors_in(captured.value(n))]
    if _is_index(node) and any(t.dtype == torch.bool for t in indices):
        return "a boolean index is counted on the host"
    return None


def _is_index(node: fx.Node) -> bool:
    return op_name(node) in ("aten.index", "aten.index_put", "aten.index_put_", "aten._unsafe_index")
