"""Regions: stretches of graphs, compiled by Inductor. Equal stretches of any traces share one region."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Sequence
from typing import Any

from torch import Tensor, fx

from ...timings import Timings
from ..ir.sizes import Condition
from ..store.artifact import register_region
from ..torch_private import inductor as torch_inductor


class CompiledSubgraph:
    """A compiled function from tensors and sizes to a list of tensors, none an alias: the target of a node. Called with
    fake tensors, it runs its operators one by one.

    Attributes:
        body: the operators and descriptions of their inputs, as text. digest: its hash.
        conditions: what must hold for its sizes (`torch_private.inductor.Signature.sizes`).
    """

    kind = "inductor"
    exact = False
    __module__ = __name__

    def __init__(
        self, body: Sequence[str], module: fx.GraphModule, artifact: Any, conditions: Sequence[Condition]
    ) -> None:
        self.body, self.module, self.conditions = tuple(body), module, tuple(conditions)
        self.digest = digest_of(body)
        self._artifact = artifact
        self.__name__ = self.__qualname__ = f"inductor_{self.digest}"  # the name in FX's generated source

    def __call__(self, *args: Any) -> Sequence[Tensor]:
        if any(map(torch_inductor.is_fake, args)):
            return self.module.forward(*args)
        return self._artifact(*args)

    def serialize(self) -> bytes:
        return pickle.dumps((self.body, self.module, self._artifact.serialize(), self.conditions))

    @classmethod
    def deserialize(cls, data: bytes) -> CompiledSubgraph:
        """The inverse of `serialize`. It executes code: use it only on bytes that this user's own process wrote."""
        body, module, artifact, conditions = pickle.loads(data)
        return cls(body, module, torch_inductor.load(artifact), conditions)


register_region(CompiledSubgraph.kind, CompiledSubgraph.deserialize)


def digest_of(body: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(body).encode()).hexdigest()[:12]


class Regions:
    """The regions of both roles' graphs, by digest.

    Attributes:
        shared: digests of the forward stretches that both roles have (`Inductor.share`).
        refused: digests of stretches that cannot be compiled, with the reason.
    """

    def __init__(self, timings: Timings) -> None:
        self._timings = timings
        self._made: dict[str, CompiledSubgraph] = {}
        self.shared: frozenset[str] = frozenset()
        self.refused: dict[str, str] = {}

    def region(
        self, body: Sequence[str], module: fx.GraphModule, signature: torch_inductor.Signature
    ) -> CompiledSubgraph | None:
        """The region with this body, compiled on first use; None if it cannot be compiled."""
        digest = digest_of(body)
        if digest not in self._made and digest not in self.refused:
            try:
                with self._timings.measure("inductor"):
                    self._made[digest] = CompiledSubgraph(body, module, *signature.compile(module))
            except torch_inductor.Uncompilable as error:
                self.refused[digest] = str(error)
        return self._made.get(digest)
