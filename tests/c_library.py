"""Computing with another C library than the installed one, or on the reference path."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lockstep.ops.native import library


@contextmanager
def using(other: Any) -> Iterator[None]:
    """Within, what `library.load` returned computes, or with None the reference path."""
    before = library.current
    _use(other)
    try:
        yield
    finally:
        _use(before)


def _use(other: Any) -> None:
    library.current = other
    for forget in library.when_changed:
        forget()
