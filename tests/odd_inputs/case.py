"""One odd input, and what is due."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

SMALL = "--max-completion-length 2 --prompts 1"
EVAL = f"eval --model tiny --task dataset {SMALL}"


@dataclass(frozen=True)
class Odd:
    """One command, what it must say (each of `words`), and its exit code; `files` are made before, by name."""

    line: str
    words: tuple[str, ...]
    code: int = 2
    files: dict[str, bytes | str] = field(default_factory=dict)
    prepare: Callable[[], None] | None = None
    stdin: str = ""
    environment: dict[str, str] = field(default_factory=dict)
    raises: str = ""  # a user's file, whose own traceback is shown
    largest: int = -1  # bytes a file may have, as on a full disk; -1 is no limit
