"""Removing what no output and no write depends on, and the copies in name that autograd leaves."""

from __future__ import annotations

from ..ir.captured import Captured, mutates, op_name
from .rewrite import rewritten

SAME_TENSOR = ("aten.detach", "aten.alias")  # graphs run without autograd, where these are their argument


def canonicalize(captured: Captured) -> tuple[Captured, str]:
    """Drop dead calls and aliases. Calls that write in place stay, and so does the order."""
    result = rewritten(captured)
    aliases = dead = 0
    for node in list(result.graph.nodes):
        if op_name(node) in SAME_TENSOR:
            node.replace_all_uses_with(node.args[0])
            result.graph.erase_node(node)
            aliases += 1
    for node in reversed(list(result.graph.nodes)):
        if node.op in ("call_function", "get_attr") and not node.users and not mutates(node):
            result.graph.erase_node(node)
            dead += 1
    return result, f"{dead} dead, {aliases} aliases removed"
