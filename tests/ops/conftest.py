"""Triton's interpreter, in the processes that run it (`processes.run_interpreted`), at twice its speed."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any


def replace_the_language_once_a_launch() -> None:
    """The interpreter puts its own functions in the place of Triton's at a launch, and again wherever a function calls
    another, which takes a third of its time; here not again for one that sees the same modules."""
    from triton import language
    from triton.runtime import interpreter

    if not hasattr(interpreter, "_LangPatchScope"):  # an earlier version's, which undoes it by other means
        return
    replace: Callable[[Any], Any] = interpreter._patch_lang
    replaced: set[int] = set()

    def once(function: Any) -> Any:
        seen = {id(value) for value in function.__globals__.values() if value is language or value is language.core}
        if seen <= replaced:
            return interpreter._LangPatchScope()
        outermost, scope = not replaced, replace(function)
        replaced.update(seen)
        undo = scope.restore
        if outermost:
            scope.restore = lambda: (replaced.clear(), undo())
        return scope

    interpreter._patch_lang = once


if os.environ.get("TRITON_INTERPRET") == "1":
    replace_the_language_once_a_launch()
