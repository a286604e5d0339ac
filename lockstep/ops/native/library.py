"""The C library: finding it, checking that it is usable, and choosing between it and the reference path.

It is built when the package is installed (`setup.py`), if there is a C compiler.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import struct
import zlib
from collections.abc import Callable
from ctypes import c_char, c_int64, c_uint, c_void_p
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any, Literal

_log = logging.getLogger("lockstep")


Job = tuple[Callable[[bytes], Any], Callable[..., bytes], int]  # makes a buffer of bytes; packs them; offset of `error`


def _job(layout: str, error: int) -> Job:
    """A struct of the C sources, whose error flag is at byte `error`."""
    packed = struct.Struct(layout)
    return (c_char * packed.size).from_buffer_copy, packed.pack, error


def _row_job(sizes: int, tensors: int) -> Job:
    """`RowJob` of vector.h: eps, rows, `sizes` sizes and the addresses of `tensors` tensors."""
    return _job(f"dq16x{sizes}q{8 * (5 - sizes)}x{tensors}P{8 * (8 - tensors)}x", 24)


JOBS: dict[str, Job] = {
    "attention": _job("4P9q4P2qPq2d16x", 192),
    "product": _job("3P7q16x", 88),
    "rms_norm": _row_job(1, 3),
    "qk_norm_rope": _row_job(4, 5),
    "silu_mul": _row_job(2, 2),
    "silu_mul_backward": _row_job(2, 3),
    "norm_products": _row_job(3, 6),
    "norm_gradient": _row_job(4, 6),
    "rotate_back": _row_job(3, 3),
}
ARGUMENTS: dict[str, list[type]] = {
    **{name: [c_void_p] for name in JOBS},
    "rope_table": [c_void_p] * 3 + [c_int64] * 2,
    "write_kv": [c_void_p] * 5 + [c_int64] * 5,
    "statistics": [c_void_p] * 7 + [c_int64] * 3,
    "scores": [c_void_p] * 7 + [c_int64] * 2,
    "draw": [c_void_p] * 6 + [c_int64] * 2,
}


def load(path: Path) -> Any:
    """The library at `path`; None if there is none, or it was built from other sources or for another machine."""
    try:
        library = ctypes.CDLL(str(path))
    except OSError:  # no such file, not whole, or made for other system libraries
        return None
    sources = b"".join(source.read_bytes() for source in sorted(path.parent.glob("*.[ch]")))
    library.kernels_checksum.restype = ctypes.c_uint32
    if library.kernels_checksum() != zlib.crc32(sources) or not library.kernels_supported():
        return None
    for name, arguments in ARGUMENTS.items():
        getattr(library, name).argtypes = arguments
    return library


def _load_openmp_parallel() -> Callable[..., None] | None:
    """The function that runs another on torch's own threads, if torch has GNU OpenMP. Threads of our own would share
    the cores with torch's, which spin for milliseconds after each of its operators."""
    try:
        run = ctypes.CDLL(None).GOMP_parallel
    except (AttributeError, TypeError, OSError):
        return None
    run.argtypes, run.restype = [c_void_p, c_void_p, c_uint, c_uint], None
    return run


openmp_parallel = _load_openmp_parallel()
paths = [Path(__file__).parent / f"_kernels{suffix}" for suffix in EXTENSION_SUFFIXES]
built: Any = next(filter(None, map(load, paths)), None)
current = built
when_changed: list[Callable[[], None]] = []  # whoever sets `current` calls these, to reset what was derived from it


def cpu_backend() -> Literal["native", "reference"]:
    """What computes float32 on a CPU in this process; the bits of a run depend on it."""
    return "reference" if current is None else "native"


@functools.cache
def _digest(path: str) -> str:
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()[:16]


def cpu_build() -> str | None:
    """The build of the C library in use, as a hash of its file; None on the reference path."""
    return None if current is None else _digest(current._name)


@functools.cache
def warn_if_missing() -> None:
    """Warn, once per process, that float32 on this CPU is computed without the C library."""
    if current is None:
        _log.warning(
            "the C operators are missing (no C compiler when this package was installed, or another CPU): generation "
            "takes two to three times as long; install a C compiler and this package again"
        )
