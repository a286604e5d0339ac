"""A request for one graph."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from ..ir.captured import Dynamic, Inputs, InputSpec, Role, Static, title_of
from .step import GraphBody


@dataclass(frozen=True)
class Request:
    """A function with the inputs, statics and open sizes of one of its graphs; see `capture`. `constants`: every Python
    value that a trace bakes in and that is not an argument of the body, by name; None: they are unknown, so the graph
    is not stored."""

    name: str
    body: GraphBody
    inputs: Inputs
    statics: Mapping[str, Static]
    writes: Collection[Role] = ()
    dynamic: Dynamic | None = None
    constants: Mapping[str, Any] | None = None

    @cached_property
    def specs(self) -> tuple[InputSpec, ...]:
        return self.inputs.specs(self.dynamic or {})

    @property
    def sizes(self) -> dict[str, int]:
        return self.inputs.open_sizes(self.specs)

    @property
    def key(self) -> tuple:
        return (*map(repr, self.statics.items()), self.specs)

    @cached_property
    def everywhere(self) -> dict[str, Any]:
        """What must be equal in every process that asks for this graph, by name; devices may differ."""
        specs = {str(spec): (spec.shape, spec.stride, spec.dtype) for spec in self.specs}
        return {"writes": sorted(self.writes)} | specs

    @property
    def title(self) -> str:
        return title_of(self.name, self.statics)

    @property
    def device(self) -> torch.device:
        return self.specs[0].device if self.specs else torch.device("cpu")
