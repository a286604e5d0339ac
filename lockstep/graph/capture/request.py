"""One graph that is asked for."""

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
    """A function with the inputs, the statics and the open sizes of one graph of it; see `capture`. `constants`: every
    Python value that the body takes from elsewhere than its arguments and that a trace bakes in, by name; None:
    unknown, and the graph is not kept for other processes."""

    name: str
    body: GraphBody
    inputs: Inputs
    statics: Mapping[str, Static]
    writes: Collection[Role] = ()
    dynamic: Dynamic | None = None
    constants: Mapping[str, Any] | None = None

    @cached_property
    def specs(self) -> tuple[InputSpec, ...]:
        return self.inputs.described(self.dynamic or {})

    @property
    def sizes(self) -> dict[str, int]:
        return self.inputs.open_sizes(self.specs)

    @property
    def key(self) -> tuple:
        return (*map(repr, self.statics.items()), self.specs)

    @cached_property
    def everywhere(self) -> dict[str, Any]:
        """What of it every process must ask for alike, by name; devices are each one's own."""
        specs = {str(spec): (spec.shape, spec.stride, spec.dtype) for spec in self.specs}
        return {"writes": sorted(self.writes)} | specs

    @property
    def title(self) -> str:
        return title_of(self.name, self.statics)

    @property
    def device(self) -> torch.device:
        return self.specs[0].device if self.specs else torch.device("cpu")
