"""Parameters by patterns of the names that they have in a Hugging Face folder."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable
from fnmatch import fnmatchcase
from typing import TypeVar

from ..errors import InputError
from .decoder import Decoder
from .hf.weight_map import weight_map

_T = TypeVar("_T")


def by_pattern(
    model: Decoder, patterns: Iterable[tuple[str, _T]], field: str, without: Collection[str] = ()
) -> dict[str, _T]:
    """What patterns say of parameters but those `without`, by the model's own names; of several the last that matches.
    A pattern (`fnmatch`: `*`, `?`, `[0-3]`) is of a tensor, such as `model.layers.*.mlp.down_proj.weight`, or of a
    module, and then of all in it. `InputError`: a pattern of `field` matches nothing, or tells tensors apart that are
    one parameter of the decoder."""
    names = {own: theirs for own, theirs in _folder_names(model).items() if own not in without}
    every = [n for theirs in names.values() for n in theirs]
    said: dict[str, _T] = {}  # by the names in a folder
    for pattern, value in patterns:
        matched = [n for n in every if fnmatchcase(n, pattern) or fnmatchcase(n, f"{pattern}.*")]
        if not matched:
            near = ", ".join(difflib.get_close_matches(pattern, every, n=3, cutoff=0.3) or every[:3])
            raise InputError(f"{field}: {pattern!r} matches no parameter that is trained, such as {near}")
        said |= dict.fromkeys(matched, value)
    for theirs in names.values():
        first, *others = theirs
        if odd := [n for n in others if said.get(n) != said.get(first)]:
            raise InputError(f"{field}: {first} and {odd[0]} are one parameter here; use patterns that match both")
    return {own: said[theirs[0]] for own, theirs in names.items() if theirs[0] in said}


def _folder_names(model: Decoder) -> dict[str, list[str]]:
    """The names in a folder of what each parameter holds; its own, of one that no folder has."""
    names: dict[str, list[str]] = {name: [] for name, _ in model.named_parameters()}
    for piece in weight_map(model.config):
        if piece.parameter in names:
            names[piece.parameter].append(piece.name)
    return {own: theirs or [own] for own, theirs in names.items()}
