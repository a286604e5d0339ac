"""Backward calls put together with their neighbours where a GPU does both in one kernel, with the same bits."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

from torch import Tensor, fx

from .. import compat
from ..ir import Captured, op_name
from .rewrite import rewritten


def fuse(captured: Captured) -> tuple[Captured, str]:
    """Put the operators of `ops.fused_backward` in place of the calls that they stand for.

    - The backward of attention and that of its rotation, whose gradients autograd lays side by side and adds to those
      of the values, padded with zeros: one call writes all three where they stay.
    - The backward of a norm, and the addition of the residual's gradient.
    - The embedding's backward, and the addition to the LM head's gradient where both are one table.
    - The addition of a gradient to its total, right behind the gradient, which is then in the cache, and is freed.
    """
    result = rewritten(captured)
    graph = result.graph
    counts = (
        (sum(map(_join_rotation, list(graph.nodes))), "rotations joined with attention"),
        (sum(map(_join_residual, list(graph.nodes))), "residual gradients with norms"),
        (sum(map(_join_table, list(graph.nodes))), "embeddings with LM heads"),
        (sum(map(_accumulate_early, list(graph.nodes))), "gradients added up as they come"),
    )
    graph.lint()
    result.module.recompile()
    return result, ", ".join(f"{count} {what}" for count, what in counts)


def _join_rotation(rotation: fx.Node) -> bool:
    if op_name(rotation) != "lockstep.qk_norm_rope_backward":
        return False
    laid, first = rotation.args[0], _item(rotation, 0)
    total = first and _only_user(first, "aten.add")
    if not (isinstance(laid, fx.Node) and op_name(laid) == "aten.cat" and _is_alone(laid) and total and first):
        return False
    (dq, dk, *more), attention = laid.args[0], laid.args[0][0].args[0]  # type: ignore[index,union-attr,misc]
    if more or op_name(attention) != "lockstep.attention_packed_backward":
        return False
    if [_item(attention, 0), _item(attention, 1)] != [dq, dk] or not (_is_alone(dq) and _is_alone(dk)):
        return False
    dv = _item(attention, 2)
    padded = dv and _only_user(dv, "aten.slice_backward")
    viewed = padded and _only_user(padded, "aten.view")
    if not (dv and padded and viewed) or set(total.args) != {viewed, first}:
        return False
    heads, kv_heads = rotation.args[5:7]
    if padded.args[2:] != (1, heads + kv_heads, heads + 2 * kv_heads, 1):  # type: ignore[operator]
        return False
    _replace(rotation, "lockstep.rotated_attention_packed_backward", [*attention.args, *rotation.args[1:]])
    total.replace_all_uses_with(first)
    _erase(total, viewed, padded, dv, rotation, laid, dk, dq, attention)
    return True


def _join_residual(norm: fx.Node) -> bool:
    if op_name(norm) != "lockstep.rms_norm_backward":
        return False
    first = _item(norm, 0)
    total = first and _only_user(first, "aten.add")
    if not (first and total) or total.kwargs or len(total.args) != 2:
        return False
    (other,) = [x for x in total.args if x is not first] or [None]
    if not (isinstance(other, fx.Node) and other < norm and _alike(other, first)):
        return False
    _replace(norm, "lockstep.rms_norm_backward_add", [*norm.args, other])
    total.replace_all_uses_with(first)
    _erase(total, norm)
    return True


def _join_table(gather: fx.Node) -> bool:
    """The rows' gradients are added in place, to memory that nobody else reads."""
    total = op_name(gather) == "lockstep.gather_rows_backward" and _only_user(gather, "aten.add")
    if not total or total.kwargs or len(total.args) != 2:
        return False
    (table,) = [x for x in total.args if x is not gather] or [None]
    if not (isinstance(table, fx.Node) and table < gather and _alike(table, gather) and _is_alone(table)):
        return False
    if op_name(table.args[0] if table.target is operator.getitem else table) != "lockstep.token_logprobs_backward":
        return False
    with gather.graph.inserting_before(gather):
        name = compat.operator_named("lockstep.add_gathered_rows.default")
        made = gather.graph.call_function(name, (table, *gather.args[:2]))
    compat.copy_tags(gather, [made])
    total.replace_all_uses_with(table)
    _erase(total, gather)
    return True


def _accumulate_early(addition: fx.Node) -> bool:
    """A total that other calls touch is added to where it was: the order of its additions is in its bits."""
    if op_name(addition) != "aten.add_" or addition.users or addition.kwargs or len(addition.args) != 2:
        return False
    total, grad = addition.args
    if not (isinstance(total, fx.Node) and isinstance(grad, fx.Node) and total.op == "placeholder"):
        return False
    if grad.op == "placeholder" or set(total.users) != {addition}:
        return False
    a, b = compat.fake_value(total), compat.fake_value(grad)
    if a.shape != b.shape or a.dtype == b.dtype:
        return False
    with addition.graph.inserting_after(_settled(grad, addition)):
        added = addition.graph.call_function(compat.operator_named("lockstep.add_gradient.default"), (total, grad))
    compat.copy_tags(addition, [added])
    addition.graph.erase_node(addition)
    return True


def _settled(grad: fx.Node, addition: fx.Node) -> fx.Node:
    """The node from which on nothing but `addition` reads or writes a gradient, and the items of its call are taken."""
    last = max([grad, *(user for user in grad.users if user is not addition)])
    while last.target is operator.getitem and last.next.target is operator.getitem:
        last = last.next
    return last


def _replace(node: fx.Node, name: str, args: Sequence[Any]) -> None:
    """Another call, of the same results, in place of a node, which stays unused."""
    with node.graph.inserting_before(node):
        made = node.graph.call_function(compat.operator_named(f"{name}.default"), tuple(args))
    compat.copy_tags(node, [made])
    compat.set_fake_value(made, compat.fake_value(node))
    node.replace_all_uses_with(made)


def _erase(*nodes: fx.Node) -> None:
    for node in nodes:
        node.graph.erase_node(node)


def _item(node: fx.Node, index: int) -> fx.Node | None:
    """The only call that takes this item of a node's results."""
    found = [user for user in node.users if user.target is operator.getitem and user.args[1] == index]
    return found[0] if len(found) == 1 else None


def _only_user(node: fx.Node, name: str) -> fx.Node | None:
    """The only reader of a node, if it calls this operator."""
    (user, *others) = node.users
    return user if not others and op_name(user) == name else None


def _is_alone(node: fx.Node) -> bool:
    return len(node.users) == 1


def _alike(a: fx.Node, b: fx.Node) -> bool:
    """Whether both are tensors of one shape and dtype, so that their sum is too."""
    x, y = compat.fake_value(a), compat.fake_value(b)
    return isinstance(x, Tensor) and isinstance(y, Tensor) and x.shape == y.shape and x.dtype == y.dtype
