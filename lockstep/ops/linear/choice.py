"""Which kernel computes a matrix product: a function of its kind and shape, from a table of measurements.

`benchmarks/tune_linear.py` writes one table per GPU, `linear_<model>.json`; shapes that it lacks follow a rule. A GPU
without a table uses that of the nearest one, by compute capability. The choice affects time, never a bit: contract C1
leaves tiles free, and the fused forms round where the separate operators round.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import torch

Kind = Literal["linear", "linear_fp32", "linear_add", "norm_linear", "norm_gate_up"]

FOLDER = Path(__file__).parents[1] / "tables"
DEFAULT_GPU = "NVIDIA H200", (9, 0)  # name and compute capability assumed on a machine without a GPU
MIN_PROGRAMS = 96  # the least that a grid should have, if its tiles can be made small enough
SHARED_BYTES = 180 * 1024  # for the stages of a program's pipeline
MAX_STAGES = 8
HOPPER_LIMITS = {"pipelined": (200 * 1024, MAX_STAGES), "tma": (220 * 1024, 12)}  # the most shared bytes and stages
MAX_ROWS = 128  # above this the library's tiles are as good
DEPTHS = (256, 128, 64)  # of a tile


class Choice(NamedTuple):
    """A kernel, by its name in `linear.kernels`, and how it runs.

    Attributes:
        block_m: rows of a tile; `block_n` is its columns and `block_k`, a multiple of 16, its depth.
        num_stages: of the pipeline; of the weights alone if the rows have their own `x_stages`.
        early: whether it lets the next kernel start early.
    """

    kernel: str
    block_m: int = 0
    block_n: int = 0
    block_k: int = 0
    num_warps: int = 0
    num_stages: int = 0
    x_stages: int = 0
    early: bool = False


Table = dict[str, dict[tuple[int, int], list[tuple[int, Choice]]]]
Candidates = Callable[[Kind, Sequence[int], int, int], list[Choice]]

LIBRARY = Choice("library")  # cuBLASLt, and row operators around it
CHAIN = Choice("pipelined", 128, 128, 64, 8, 4)  # every other choice, the library included, must give its bits
overrides: dict[tuple[int, int], Choice] = {}  # by (columns, depth), where the machine check found that others differ
requested: set[tuple[Any, ...]] = set()  # products requested so far: kind, rows, columns, depth and, with a bias, True
registered: dict[str, Candidates] = {}  # by kernels from outside the package (`linear.kernels.register`)


def choose(kind: Kind, rows: int, columns: int, depth: int, biased: bool = False) -> Choice:
    """The kernel for `rows` x `depth` times `columns` x `depth`; `columns` counts the weight's rows, gate and up
    together."""
    requested.add((kind, rows, columns, depth, True) if biased else (kind, rows, columns, depth))
    if (columns, depth) in overrides:
        return overrides[columns, depth]
    for candidates in registered.values():
        for choice in candidates(kind, (rows,), columns, depth):
            return choice
    for bound, choice in table()[kind].get((columns, depth), ()):
        if rows <= bound:
            return choice
    return choose_by_rule(kind, rows, columns, depth)


def choose_by_rule(kind: Kind, rows: int, columns: int, depth: int) -> Choice:
    """The choice for shapes that are in no table. Over 48 shapes of nine models, at 8 to 128 rows on an H200, it takes
    1 % longer than the fastest tile on average and 29 % at most (`benchmarks/tune_linear.py --alone`).

    Rows that do not all begin at a multiple of 16 bytes never go to the library: its kernels for them add in another
    order, and take 2 to 5 times as long as the chain (on an H200, with 4,099 and 151,669 columns).
    """
    if rows > MAX_ROWS:
        return LIBRARY if columns % 8 == depth % 8 == 0 else CHAIN
    if depth % min(DEPTHS) or columns % 8 or depth == min(DEPTHS):
        return choose_portable(kind, rows, columns)
    if kind == "linear_fp32":
        return _choose_head(rows, depth)
    return _choose_gated(rows, columns // 2, depth) if kind == "norm_gate_up" else _choose_plain(rows, columns, depth)


def _choose_head(rows: int, depth: int) -> Choice:
    """For the LM head, which has many columns."""
    if rows > 64:
        return LIBRARY
    return _tile("pipelined", _block_rows(rows), 128, 128 if rows <= 32 else 64, depth)


def _choose_gated(rows: int, columns: int, depth: int) -> Choice:
    """For gated products; `columns` are the result's."""
    if rows <= 16 or (rows <= 32 and columns < 3072):
        width = _block_columns(columns, 64, 64, 32)
        return _tile("pipelined", 16, width, 256 if width == 32 else 128, depth, weights=2)
    if 32 < rows <= 64 and columns < 8192:
        width = _block_columns(columns, 32, 64)
        return _tile("tma", 64, width, 256 if width == 16 else 128, depth, weights=2)
    return LIBRARY


def _choose_plain(rows: int, columns: int, depth: int) -> Choice:
    least = 32 if columns >= 1024 else 16
    if rows <= 16:
        return _tile("pipelined", 16, _block_columns(columns, 64, 64, least), 256, depth)
    if rows <= 32:
        if columns > 4096:
            return LIBRARY if columns * depth >= 15e6 else _tile("pipelined", 32, 64, 128, depth)
        return _tile("pipelined", 16, _block_columns(columns, 64, 40, least), 256, depth)
    if rows <= 64:
        return _tile("tma", 64, _block_columns(columns, 64, 65), 256 if columns <= 2304 else 128, depth)
    if columns > 4096 or columns * depth >= 20e6:
        return LIBRARY
    width = _block_columns(columns, 64, 40)
    return _tile("tma", 64, width, 128 if width == 64 else 256, depth)


def _tile(kernel: str, block_m: int, block_n: int, block_k: int, depth: int, weights: int = 1) -> Choice:
    """A tile at most `block_k` deep, so that there are two steps or more, with as many stages as fit."""
    block_k = next(k for k in DEPTHS if k <= block_k and depth % k == 0 and depth > k)
    shared, most = HOPPER_LIMITS[kernel]
    stages = min(shared // (2 * block_k * (block_m + weights * block_n)), depth // block_k + 1, most)
    return Choice(kernel, block_m, block_n, block_k, 4, stages, early=kernel == "pipelined")


def _block_columns(columns: int, most: int, programs: int, least: int = 16) -> int:
    """A tile's columns: `most`, or fewer to have `programs` programs, but no fewer than `least`."""
    while most > least and columns < programs * most:
        most //= 2
    return most


def _block_rows(rows: int) -> int:
    """A tile's rows, 16 to 64, enough to hold `rows` if possible."""
    return next(block for block in (16, 32, 64) if rows <= block or block == 64)


def choose_portable(kind: Kind, rows: int, columns: int) -> Choice:
    """For any GPU that Triton supports: tiles small enough that the grid fills it, with as many stages as fit."""
    weights = weight_tiles(kind)
    block_m = _block_rows(rows)
    block_n = _block_columns(-(-rows // block_m) * (columns // weights), 128, MIN_PROGRAMS)
    width = block_m + block_n * weights
    block_k = 128 if width <= 128 else 64
    stages = min(MAX_STAGES, SHARED_BYTES // (2 * width * block_k))
    return Choice("pipelined", block_m, block_n, block_k, 4, stages, early=True)


def weight_tiles(kind: Kind) -> int:
    """How many weight tiles a program multiplies by: two, of gate and up, or one."""
    return 2 if kind == "norm_gate_up" else 1


@functools.cache
def table() -> Table:
    """For each kind and (columns, depth): ascending bounds on the rows, and the fastest choice up to each; for this
    process's GPU or, without one, `DEFAULT_GPU`."""
    return table_for(*current_gpu())


def current_gpu() -> tuple[str, tuple[int, int]]:
    if not torch.cuda.is_available():
        return DEFAULT_GPU
    return torch.cuda.get_device_name(), torch.cuda.get_device_capability()


def table_path(gpu: str) -> Path:
    return FOLDER / f"linear_{gpu.lower().removeprefix('nvidia ').replace(' ', '_')}.json"


def table_for(gpu: str, capability: tuple[int, int]) -> Table:
    """The table of a GPU, or of the nearest one."""

    def distance(raw: dict[str, Any]) -> tuple[bool, int, int]:
        major, minor = raw["capability"]
        return raw["gpu"] != gpu, abs(major - capability[0]), abs(minor - capability[1])

    raw_tables = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(FOLDER.glob("linear_*.json"))]
    nearest = min(raw_tables, key=distance)
    table: Table = {kind: {} for kind in get_args(Kind)}
    for kind, shapes in table.items():
        for shape, entries in nearest.get(kind, {}).items():
            columns, depth = map(int, shape.split("x"))
            shapes[columns, depth] = [(bound, Choice(*choice)) for bound, choice in entries]
    return table
