"""Which kernel computes a matrix product: a function of its kind and shape, from a table that was measured.

`linear_table.json` is written by `benchmarks/tune_linear.py`; shapes that it lacks get a rule. The choice moves time,
never a bit: contract C1 leaves tiles free, and the fused forms round where the separate operators round.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

Kind = Literal["linear", "linear_fp32", "linear_add", "norm_linear", "norm_gate_up"]

PATH = Path(__file__).with_suffix(".json")
PROGRAMS = 96  # that a grid should have at least, if its tiles can be made small enough
SHARED_BYTES = 180 * 1024  # for the stages of a program's pipeline
MAX_STAGES = 8
MAX_ROWS = 128  # beyond them the library's tiles are as good


class Choice(NamedTuple):
    """A Triton kernel's tile sizes (block_k is a multiple of 16), warps and pipeline stages; whether it lets the next
    kernel start early, and whether it brings its weights into the L2 cache while it waits for the one before."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    early: bool = False
    prefetch: bool = False


class AsyncChoice(NamedTuple):
    """Tile sizes of `linear.hopper_async`, and the stages of its rows and of its weights."""

    block_m: int
    block_n: int
    block_k: int
    x_stages: int
    w_stages: int


class TmaChoice(NamedTuple):
    """Tile sizes of `linear.hopper_tma`, and the stages of both operands, two at least. `block_m` is 64 or 128, and
    there are more rows than half of it; the depth is `block_k` several times."""

    block_m: int
    block_n: int
    block_k: int
    stages: int


Kernel = Choice | AsyncChoice | TmaChoice
_NAMED = {"async": AsyncChoice, "tma": TmaChoice}  # in the table
CHAIN = Choice(128, 128, 64, 8, 4)  # what every other choice, and the library, is held to
overrides: dict[
    tuple[int, int], Choice
] = {}  # of (columns, depth), where `machine_check.check.check` found another choice to differ
used: set[tuple[Kind, int, int, int]] = set()  # what was asked for so far


def choose(kind: Kind, rows: int, columns: int, depth: int) -> Kernel | None:
    """The kernel for `rows` x `depth` times `columns` x `depth`; None: cuBLASLt, and row operators around it.

    `columns` counts the weight's rows, gate and up together.
    """
    used.add((kind, rows, columns, depth))
    if (columns, depth) in overrides:
        return overrides[columns, depth]
    for bound, choice in table()[kind].get((columns, depth), ()):
        if rows <= bound:
            return choice
    return by_rule(kind, rows, columns)


def by_rule(kind: Kind, rows: int, columns: int) -> Choice | None:
    """What `choose` gives where nothing was measured."""
    weights = 2 if kind == "norm_gate_up" else 1
    return rule(rows, columns // weights, weights)


def rule(rows: int, columns: int, weights: int) -> Choice | None:
    """For shapes that were not measured: tiles small enough that the grid fills the GPU, then as deep as fits.

    Args:
        weights: tiles of the weight that a program multiplies with.
    """
    if rows > MAX_ROWS:
        return None
    block_m, block_n = 16, 128
    while block_m < min(rows, 64):
        block_m *= 2
    while block_n > 16 and -(-rows // block_m) * columns < PROGRAMS * block_n:
        block_n //= 2
    width = block_m + block_n * weights
    block_k = 128 if width <= 128 else 64
    stages = min(MAX_STAGES, SHARED_BYTES // (2 * width * block_k))
    return Choice(block_m, block_n, block_k, 4, stages, early=True)


@functools.cache
def table() -> dict[str, dict[tuple[int, int], list[tuple[int, Kernel | None]]]]:
    """Of each kind and (columns, depth): bounds on the rows, ascending, and what was fastest up to each."""
    raw: dict[str, Any] = json.loads(PATH.read_text(encoding="utf-8"))
    return {
        kind: {_shape(name): _entries(found) for name, found in raw.get(kind, {}).items()} for kind in get_args(Kind)
    }


def _shape(name: str) -> tuple[int, int]:
    columns, depth = name.split("x")
    return int(columns), int(depth)


def _entries(raw: list[tuple[int, Any]]) -> list[tuple[int, Kernel | None]]:
    return [(bound, found and _entry(found)) for bound, found in raw]


def _entry(raw: list[Any]) -> Kernel:
    if raw[0] in _NAMED:
        return _NAMED[raw[0]](*raw[1:])
    return Choice(*raw[:5], *map(bool, raw[5:]))


def entry(choice: Kernel) -> list[str | int]:
    """As the table's file has it."""
    return [*(name for name, made in _NAMED.items() if isinstance(choice, made)), *map(int, choice)]
