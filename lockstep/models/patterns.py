"""Selecting parameters by patterns of their names in a Hugging Face folder."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable
from fnmatch import fnmatchcase
from typing import TypeVar

from ..errors import InputError
from .decoder import Decoder
from .hf.weight_map import weight_map

_T = TypeVar("_T")


def select_by_pattern(
    model: Decoder, patterns: Iterable[tuple[str, _T]], field: str, without: Collection[str] = ()
) -> dict[str, _T]:
    """The values that patterns assign to parameters, by the decoder's names; the last matching pattern wins. Parameters
    in `without` are left out. A pattern (`fnmatch`: `*`, `?`, `[0-3]`) names tensors, such as
    `model.layers.*.mlp.down_proj.weight`, or modules with all their tensors. `InputError` names `field`: a pattern
    matches nothing, or tensors that are fused in one parameter of the decoder get different values."""
    names = {own: theirs for own, theirs in _folder_names(model).items() if own not in without}
    every = [n for theirs in names.values() for n in theirs]
    assigned: dict[str, _T] = {}  # by the names in a folder
    for pattern, value in patterns:
        matched = [n for n in every if fnmatchcase(n, pattern) or fnmatchcase(n, f"{pattern}.*")]
        if not matched:
            near = ", ".join(difflib.get_close_matches(pattern, every, n=3, cutoff=0.3) or every[:3])
            raise InputError(f"{field}: {pattern!r} matches no parameter that is trained, such as {near}")
        assigned |= dict.fromkeys(matched, value)
    for theirs in names.values():
        first, *others = theirs
        if odd := [n for n in others if assigned.get(n) != assigned.get(first)]:
            raise InputError(f"{field}: {first} and {odd[0]} are one parameter here; use patterns that match both")
    return {own: assigned[theirs[0]] for own, theirs in names.items() if theirs[0] in assigned}


def _folder_names(model: Decoder) -> dict[str, list[str]]:
    """For each parameter, the names of its tensors in a folder; its own name if no folder has it."""
    names: dict[str, list[str]] = {name: [] for name, _ in model.named_parameters()}
    for piece in weight_map(model.config):
        if piece.parameter in names:
            names[piece.parameter].append(piece.name)
    return {own: theirs or [own] for own, theirs in names.items()}
