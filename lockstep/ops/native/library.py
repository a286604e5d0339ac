"""The C library: finding it, checking that it fits, and choosing between it and the reference path.

It is built when the package is installed (`setup.py`), if there is a C compiler.
"""

from __future__ import annotations

import contextlib
import ctypes
import zlib
from collections.abc import Iterator
from ctypes import c_float, c_int64, c_void_p
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Literal

FOLDER = Path(__file__).parent


class Attention(ctypes.Structure):
    """`Attention` of attention.c."""

    _fields_ = [
        *((name, c_void_p) for name in ("out", "q", "k", "v")),
        *((name, c_int64) for name in ("q_stride", "k_stride", "v_stride")),
        *((name, c_int64) for name in ("tokens", "kv_rows", "sequences", "heads", "kv_heads", "dim")),
        *((name, c_void_p) for name in ("cu_seqlens", "context_len", "prefix_start", "block_table")),
        *((name, c_int64) for name in ("page_size", "table_width")),
    ]


ARGUMENTS: dict[str, list[type]] = {
    "rms_norm": [c_void_p] * 3 + [c_int64] * 2 + [c_float],
    "qk_norm_rope": [c_void_p] * 5 + [c_int64] * 5 + [c_float],
    "silu_mul": [c_void_p] * 2 + [c_int64] * 2,
    "write_kv": [c_void_p] * 5 + [c_int64] * 5,
    "attention": [c_void_p] + [c_int64] * 2,
    "statistics": [c_void_p] * 7 + [c_int64] * 3,
    "draw": [c_void_p] * 6 + [c_int64] * 2,
}


def load(path: Path) -> ctypes.CDLL | None:
    """The library at `path`; None when there is none, or one of other sources or for another machine."""
    if not path.exists():
        return None
    library = ctypes.CDLL(str(path))
    sources = b"".join(source.read_bytes() for source in sorted(FOLDER.glob("*.[ch]")))
    library.kernels_checksum.restype = ctypes.c_uint32
    if library.kernels_checksum() != zlib.crc32(sources) or not library.kernels_supported():
        return None
    for name, arguments in ARGUMENTS.items():
        getattr(library, name).argtypes = arguments
    return library


built = next(filter(None, (load(FOLDER / f"_kernels{suffix}") for suffix in EXTENSION_SUFFIXES)), None)
current = built


def cpu_backend() -> Literal["native", "reference"]:
    """What computes float32 on a CPU in this process. The bits of a run depend on it."""
    return "reference" if current is None else "native"


@contextlib.contextmanager
def using(library: ctypes.CDLL | None) -> Iterator[None]:
    """Compute with this library, or with None on the reference path: for tests."""
    global current
    before, current = current, library
    try:
        yield
    finally:
        current = before
