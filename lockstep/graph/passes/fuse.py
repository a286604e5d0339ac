"""Fuses calls with their neighbours where one GPU kernel does both, with the same bits."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, cast

from torch import Tensor, fx

from ...ops.records import PLAIN, AttentionGradient, Packed, Rotation
from ..ir.captured import Captured, aliased_arguments, op_name, written_arguments
from ..ir.cross_rank_sums import PUSH, PUSHED, PUSHED_NORM, communicates
from ..torch_private import trace as torch_trace
from .rewrite import match_call, reachable_nodes, rewritten

ATTENTION_ARGS = len(AttentionGradient._fields) + len(Packed._fields)  # arguments of attention's backward before scores
ROTATION_ARGS = 2 + len(Rotation._fields)  # rotation's backward: gradient, projection, and the rotation
UNBIASED_ARGS = 5  # of a pushed product and sum, before its bias
# Products that norm their rows: what they are without, and where the norm's offset is in the arguments after epsilon.
_APART = {"lockstep.norm_linear": ("lockstep.normed_linear", 1), "lockstep.norm_gate_up": ("lockstep.gate_up", 0)}


def fuse(captured: Captured) -> tuple[Captured, str]:
    """Replace groups of calls by the operators of `fused.backward`, and of `distributed.push`.

    - The backward of attention and of its rotation. Autograd concatenates the gradients of queries and keys, and adds
      those of the values padded with zeros; the fused call writes all three in place. The addition would turn a -0
      into 0, which the matrix products that read these gradients cannot distinguish.
    - The backward of a norm and the addition of the residual's gradient.
    - The embedding's backward and the addition to the LM head's gradient, where both share one table.
    - Gradient accumulation, moved right behind each gradient, which is then still in cache and can be freed early.
    - A product, or attention of a decode step, and the push of its columns; and a norm that alone reads all columns.
    """
    result = rewritten(captured)
    joins = {
        "rotations joined with attention": _join_rotation,
        "residual gradients with norms": _join_residual,
        "embeddings with LM heads": _join_table,
        "gradients added up as they come": _accumulate_early,
        "pushes with what they push": _join_push,
        "norms with what they read": _join_norm,
    }
    counts = {what: sum(map(join, list(result.graph.nodes))) for what, join in joins.items()}
    return result, ", ".join(f"{count} {what}" for what, count in counts.items())


def _join_rotation(rotation: fx.Node) -> bool:
    if op_name(rotation) != "lockstep.qk_norm_rope_backward":
        return False
    laid, first = match_call(rotation.args[0], "aten.cat"), _item(rotation, 0)
    total = first and _only_user(first, "aten.add")
    if not (laid and first and total and _has_one_user(laid)):
        return False
    parts: Any = laid.args[0]
    attention = match_call(_source(parts[0]), "lockstep.attention_packed_backward")
    if not attention or [_item(attention, 0), _item(attention, 1)] != parts or not all(map(_has_one_user, parts)):
        return False
    values = _item(attention, 2)
    padded = values and _only_user(values, "aten.slice_backward")
    viewed = padded and _only_user(padded, "aten.view")
    if not (values and padded and viewed):
        return False
    heads, kv_heads = cast(tuple[int, int], rotation.args[5:7])
    if set(total.args) != {viewed, first} or padded.args[2:] != (1, heads + kv_heads, heads + 2 * kv_heads, 1):
        return False
    needed, scores = attention.args[:ATTENTION_ARGS], attention.args[ATTENTION_ARGS:]
    own, offset = rotation.args[1:ROTATION_ARGS], rotation.args[ROTATION_ARGS:]
    if offset:  # it follows all scores, of which trailing defaults may have been left out
        scores = (*scores, *PLAIN[len(scores) :])
    _replace(rotation, "lockstep.rotated_attention_packed_backward", [*needed, *own, *scores, *offset])
    total.replace_all_uses_with(first)
    _erase(total, viewed, padded, values, rotation, laid, *parts, attention)
    return True


def _join_residual(norm: fx.Node) -> bool:
    first = _item(norm, 0) if op_name(norm) == "lockstep.rms_norm_backward" else None
    total = first and _only_user(first, "aten.add")
    other = total and first and _other_term(total, first)
    if not (first and total and other and other < norm):
        return False
    _replace(norm, "lockstep.rms_norm_backward_add", [*norm.args[:4], other, *norm.args[4:]])
    total.replace_all_uses_with(first)
    _erase(total, norm)
    return True


def _join_table(gather: fx.Node) -> bool:
    """The embedding's gradient is added in place to the LM head's, which nothing else reads."""
    is_gather = op_name(gather) == "lockstep.gather_rows_backward"
    total = _only_user(gather, "aten.add") if is_gather else None
    table = total and _other_term(total, gather)
    if not (total and table and table < gather and _has_one_user(table)):
        return False
    if not match_call(_source(table), "lockstep.token_logprobs_backward"):
        return False
    with gather.graph.inserting_before(gather):
        _insert(gather, "lockstep.add_gathered_rows", [table, *gather.args[:2]])
    total.replace_all_uses_with(table)
    _erase(total, gather)
    return True


def _accumulate_early(addition: fx.Node) -> bool:
    """Accumulate a gradient as soon as it is computed. If other calls use its total, the addition stays in place, as
    the order of additions determines the bits."""
    if op_name(addition) != "aten.add_" or addition.users or addition.kwargs or len(addition.args) != 2:
        return False
    total, grad = addition.args
    if not (isinstance(total, fx.Node) and isinstance(grad, fx.Node) and total.op == "placeholder"):
        return False
    if grad.op == "placeholder" or set(total.users) != {addition}:
        return False
    a, b = torch_trace.fake_value(total), torch_trace.fake_value(grad)
    if a.shape != b.shape or a.dtype == b.dtype:
        return False
    with addition.graph.inserting_after(_last_early_use(grad, addition)):
        _insert(addition, "lockstep.add_gradient", [total, grad])
    addition.graph.erase_node(addition)
    return True


def _join_push(push: fx.Node) -> bool:
    source: Any = push.args[0] if op_name(push) == PUSH else None
    viewed = match_call(source, "aten.view")
    if viewed and _has_one_user(viewed):  # heads side by side
        source = match_call(viewed.args[0], "lockstep.attention_decode")
        if source and torch_trace.fake_value(source).shape[0] != torch_trace.fake_value(viewed).shape[0]:
            return False  # heads as rows
    if not isinstance(source, fx.Node) or push.args[3:] != (False,):  # to the rows' owners
        return False
    name = op_name(source).replace(".norm_gate_up", ".gate_up").replace(".", ".push_")
    if name not in PUSHED or source.kwargs or _is_written(source) or _is_written(push):
        return False
    if any(map(communicates, _between(source, push))):  # whose order stays that of eager calls
        return False
    if op_name(source) == "lockstep.norm_gate_up":
        source = _part_norm(source)
    place = PUSHED[name]
    _join(source, push, name, [*source.args[:place], *push.args[1:3], *source.args[place:]])
    _erase(push, *([viewed] if viewed else []), source)
    return True


def _join_norm(norm: fx.Node) -> bool:
    """A norm, of itself or of a product that norms its rows, is all that reads the columns of a pushed product. Its
    weights are an input that nobody writes: they are read sooner than before, by a kernel that does not wait."""
    if op_name(norm) not in {"lockstep.rms_norm", *_APART} or norm.kwargs:
        return False
    whole, weight = cast(tuple[fx.Node, fx.Node], norm.args[:2])
    pushed = match_call(_source(whole), "lockstep.push_linear_add")
    own = pushed and _item(pushed, 0)
    if not (pushed and own and whole is _item(pushed, 1) and _has_one_user(whole)):
        return False
    if any(pushed.args[UNBIASED_ARGS:]) or weight.op != "placeholder" or _is_written(weight):
        return False
    if norm.args.count(whole) > 1:  # the product's weights, too
        return False
    if op_name(norm) in _APART:
        norm = cast(fx.Node, _part_norm(norm).args[0])
    elif _is_written(norm):
        return False
    _join(own, norm, PUSHED_NORM, [*pushed.args[:UNBIASED_ARGS], *norm.args[1:]])
    _erase(norm, whole, own, pushed)
    return True


def _join(first: fx.Node, second: fx.Node, name: str, args: Sequence[Any]) -> None:
    """Insert a call before `first` whose results take the places of two calls' results."""
    with first.graph.inserting_before(first):
        both = _insert(first, name, args)
        parts = [first.graph.call_function(operator.getitem, (both, i)) for i in range(2)]
    torch_trace.set_fake_value(both, tuple(map(torch_trace.fake_value, (first, second))))
    for node, part in zip((first, second), parts, strict=True):
        torch_trace.copy_tags(node, [part])
        torch_trace.set_fake_value(part, torch_trace.fake_value(node))
        node.replace_all_uses_with(part)


def _part_norm(product: fx.Node) -> fx.Node:
    """A product of a norm's result, in place of one that norms its rows, which is the same two kernels."""
    name, place = _APART[op_name(product)]
    x, weight, matrix, eps, *others = product.args
    offset = others[place : place + 1]
    with product.graph.inserting_before(product):
        norm = _insert(product, "lockstep.rms_norm", [x, weight, eps, *offset])
        found = _insert(product, name, [norm, matrix, *others[:place], *others[place + 1 :]])
    torch_trace.set_fake_value(norm, torch_trace.fake_value(cast(fx.Node, x)))
    torch_trace.set_fake_value(found, torch_trace.fake_value(product))
    product.replace_all_uses_with(found)
    _erase(product)
    return found


def _between(first: fx.Node, last: fx.Node) -> Iterator[fx.Node]:
    """The nodes between two, in order."""
    while (first := first.next) is not last:
        yield first


def _is_written(value: fx.Node) -> bool:
    """Whether a call writes a result in place, itself or through a view. Before its push, the push would bring other
    words; later, what is known of memory would count it as a write to both results of the joined call."""

    def users_through_views(node: fx.Node) -> Iterable[fx.Node]:
        return node.users if node is value or aliased_arguments(node) else ()

    calls = reachable_nodes(value, users_through_views, lambda _: True)
    same = {value, *filter(aliased_arguments, calls)}
    return any(not same.isdisjoint(written_arguments(call)) for call in calls)


def _last_early_use(grad: fx.Node, addition: fx.Node) -> fx.Node:
    """The last node before `addition` that uses a gradient, itself or through a view; moved past `getitem` calls that
    follow it."""
    base = grad
    while base.target is not operator.getitem and (sources := aliased_arguments(base)):
        base = sources[0]

    def users_through_views(node: fx.Node) -> Iterable[fx.Node]:
        return node.users if node is base or aliased_arguments(node) else ()

    last = max([grad, *reachable_nodes(base, users_through_views, lambda node: node < addition)])
    while last.target is operator.getitem and last.next.target is operator.getitem:
        last = last.next
    return last


def _replace(node: fx.Node, name: str, args: Sequence[Any]) -> None:
    """Insert another call with the same results for the users of a node, which is left unused."""
    with node.graph.inserting_before(node):
        call = _insert(node, name, args)
    torch_trace.set_fake_value(call, torch_trace.fake_value(node))
    node.replace_all_uses_with(call)


def _insert(source: fx.Node, name: str, args: Sequence[Any]) -> fx.Node:
    """A new call of an operator at the graph's insertion point, with the tags of another node."""
    call = source.graph.call_function(torch_trace.operator_named(f"{name}.default"), tuple(args))
    torch_trace.copy_tags(source, [call])
    return call


def _erase(*nodes: fx.Node) -> None:
    for node in nodes:
        node.graph.erase_node(node)


def _source(value: object) -> object:
    return value.args[0] if isinstance(value, fx.Node) and value.target is operator.getitem else None


def _item(node: fx.Node, index: int) -> fx.Node | None:
    found = [user for user in node.users if user.target is operator.getitem and user.args[1] == index]
    return found[0] if len(found) == 1 else None


def _only_user(node: fx.Node, name: str) -> fx.Node | None:
    """The only user of a node, if it calls this operator."""
    return match_call(next(iter(node.users)), name) if _has_one_user(node) else None


def _has_one_user(node: fx.Node) -> bool:
    return len(node.users) == 1


def _other_term(total: fx.Node, term: fx.Node) -> fx.Node | None:
    """The other operand of an addition, if it is another tensor of the same shape and dtype as `term`."""
    others = [x for x in total.args if x is not term]
    if total.kwargs or len(total.args) != 2 or len(others) != 1 or not isinstance(others[0], fx.Node):
        return None
    x, y = torch_trace.fake_value(others[0]), torch_trace.fake_value(term)
    is_alike = isinstance(x, Tensor) and isinstance(y, Tensor) and x.shape == y.shape and x.dtype == y.dtype
    return others[0] if is_alike else None
