"""A block with operators of torch's between ours, trained on and generated from, without a model around it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from fake_recorder import FakeRecorder
from torch import Tensor, nn

from lockstep import ops
from lockstep.config import CompileConfig
from lockstep.graph import Case, Differentiated, Inputs, Runtime, module_inputs, substitute_inputs
from lockstep.graph.passes.compiled_subgraph import Regions
from lockstep.graph.torch_private.inductor import missing_compiler

CPU = torch.device("cpu")
needs_inductor = pytest.mark.skipif(missing_compiler(CPU) is not None, reason=f"needs {missing_compiler(CPU)}")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up = nn.Parameter(torch.rand(8)), nn.Parameter(torch.randn(12, 8))
        self.down = nn.Parameter(torch.randn(8, 12))

    def forward(self, x: Tensor) -> Tensor:
        h = ops.linear(ops.rms_norm(x, self.norm, 1e-6), self.up)
        return ops.linear(torch.tanh(h * 0.7) * h + 1, self.down)


def add_up(totals: Any, grads: Any) -> None:
    for total, grad in zip(totals, grads, strict=True):
        total.add_(grad)


class TwoRoles:
    """`train` adds gradients and counts rows, `generate` writes a row of a cache; both return the block's result.

    Args:
        call: calls the block, for a block that is compiled by itself.
    """

    def __init__(self, runtime: Runtime | None = None, call: Callable[..., Tensor] | None = None) -> None:
        torch.manual_seed(0)
        self.block, self._call = nn.Sequential(Block()), call
        own = module_inputs(self.block)
        self.grad = {name: torch.full_like(p, 0.5) for name, p in own.param.items()}
        self.rows, self.cache = torch.zeros(2), torch.zeros(4, 8)
        training = Inputs(own.param, self.grad, {**own.buffer, "rows": self.rows})
        generating = Inputs(own.param, buffer=own.buffer, kv={"cache": self.cache})
        body = Differentiated(self.forward, add_up)
        dynamic = {"x": ("T", None)}
        if runtime is not None:
            self.train = runtime.program("train", body, training, {"grad", "buffer"}, dynamic)
            self.generate = runtime.program("generate", self.generated, generating, {"kv"}, dynamic)
        self._eager = {"train": (body, training), "generate": (self.generated, generating)}

    def forward(self, t: Inputs) -> tuple[Tensor, dict[str, Tensor]]:
        y = self._block(t)
        t.buffer["rows"][0].add_(y.shape[0])
        return (y * y.detach().cos()).sum(), {"y": y.detach() * 1}

    def generated(self, t: Inputs) -> dict[str, Tensor]:
        y = self._block(t)
        t.kv["cache"][1].copy_(y[0].detach())
        return {"y": y.detach() * 1}

    def _block(self, t: Inputs) -> Tensor:
        with substitute_inputs(self.block, t) if self._call is None else contextlib.nullcontext():
            return self.block(t.user["x"]) if self._call is None else self._call(self.block[0], t.user["x"])

    def eager(self, name: str, x: Tensor) -> dict[str, Tensor]:
        body, inputs = self._eager[name]
        with torch.no_grad():
            return dict(body(Inputs(**{**vars(inputs), "user": {"x": x}})))

    def work(self) -> list[Any]:
        """For `graph.trust`."""
        cases = [Case("six", {"x": batch(6)}), Case("three", {"x": batch(3)})]
        return [(self.train, cases), (self.generate, cases)]

    def state(self) -> dict[str, Tensor]:
        return {
            **{f"grad {k}": g.clone() for k, g in self.grad.items()},
            "rows": self.rows.clone(),
            "cache": self.cache,
        }


def batch(rows: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, 8, generator=torch.Generator().manual_seed(seed))


def results(roles: TwoRoles, eager: bool = False) -> dict[str, Tensor]:
    """What six launches of two shapes return and leave behind."""
    found = {}
    for i, rows in enumerate((6, 3, 6)):
        for name in ("train", "generate"):
            x = batch(rows, seed=i)
            made = roles.eager(name, x) if eager else getattr(roles, name)({"x": x})
            found[f"{name} {i}"] = made["y"].clone()
    return {**found, **roles.state()}


def runtime_of(capture: str, backend: str, mode: str = "none", regions: Regions | None = None, **given: Any) -> Runtime:
    config = CompileConfig(capture, mode, backend=backend, **given)
    runtime = Runtime(config, CPU, recorder=FakeRecorder())
    if regions is not None and backend == "inductor":
        runtime.builder.backend.regions = regions  # type: ignore[attr-defined]
    return runtime


@contextlib.contextmanager
def quick_inductor() -> Iterator[None]:
    """Without compiling programs that find out what the processor can, which takes longer than all tests."""
    config = torch._inductor.config
    before, config.cpp.vec_isa_ok = config.cpp.vec_isa_ok, True
    try:
        yield
    finally:
        config.cpp.vec_isa_ok = before
