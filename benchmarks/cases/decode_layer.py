"""A decode layer but for its attention: our fused operators against library calls, in a CUDA graph over all layers.

The library side is cuBLAS (free to split K), torch's RMSNorm, SiLU, products and additions, our rotary kernel and two
`index_copy_`. The floor is the bytes of the weights over the memory's bandwidth.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable

import torch
import torch.nn.functional as F
from common import Report, graph_us
from torch import Tensor

from lockstep import machine, ops
from lockstep.models.init import architecture
from lockstep.ops.linear import cublas

machine.restrict_to_local_gpu()  # of several processes each has one
EPS, PAGE_SIZE = 1e-6, 16
BANDWIDTH = 4.4e6  # bytes a microsecond, measured on an H200
DEVICE, DTYPE = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)


class Stack:
    """Random weights of `count` layers (default: all), a cache, and the operands of a step. Of `ranks` that share the
    layers one has its part of each weight's columns and of the heads; what goes into a product is whole."""

    def __init__(self, arch: str, rows: int, count: int | None = None, device: str = DEVICE, ranks: int = 1) -> None:
        c = self.config = architecture(arch)
        self.device = device
        self.num_heads, self.num_kv_heads = c.num_heads // ranks, c.num_kv_heads // ranks
        random = self._random

        heads, kv_heads = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        self.layers = [
            (
                random((heads + 2 * kv_heads) // ranks, c.hidden_size),
                random(c.hidden_size // ranks, heads),
                random(2 * c.intermediate_size // ranks, c.hidden_size),
                random(c.hidden_size // ranks, c.intermediate_size),
            )
            for _ in range(count or c.num_layers)
        ]
        self.norm, self.head_norm = random(c.hidden_size), random(c.head_dim)
        self._set_rows(rows)

    def _random(self, *shape: int) -> Tensor:
        return torch.randn(shape, device=self.device, dtype=DTYPE) * 0.02

    def _set_rows(self, rows: int) -> None:
        c = self.config
        self.x, self.rope = self._random(rows, c.hidden_size), torch.randn(rows, c.head_dim, device=self.device)
        self.cache = [self._random(rows + 1, PAGE_SIZE, self.num_kv_heads, c.head_dim) for _ in range(2)]
        self.slots = torch.arange(rows, device=self.device) * PAGE_SIZE

    def with_rows(self, rows: int) -> Stack:
        """The same weights at another number of rows."""
        other = copy.copy(self)
        other._set_rows(rows)
        return other

    def heads(self) -> ops.Rotation:
        return ops.Rotation(self.head_norm, self.head_norm, self.rope, self.num_heads, self.num_kv_heads, EPS)

    def parts(self, fused: bool) -> dict[str, Callable[[], object]]:
        """Each part over all layers, and all of them in turn."""
        parts: dict[str, Callable[[Tensor, tuple[Tensor, ...]], Tensor]] = self._fused() if fused else self._library()
        first = {"qkv": self.x}
        for name, last in (("rope", "qkv"), ("o", "rope"), ("gate_up", "qkv"), ("down", "gate_up")):
            source = first[last] if name == "gate_up" else parts[last](first[last], self.layers[0])
            first[name] = source

        def all_parts() -> Tensor:
            x = self.x
            for layer in self.layers:
                self.residual = x
                x = parts["o"](parts["rope"](parts["qkv"](x, layer), layer), layer)
                self.residual = x
                x = parts["down"](parts["gate_up"](x, layer), layer)
            return x

        self.residual = self.x
        alone = {n: (lambda n=n: [parts[n](first[n], layer) for layer in self.layers]) for n in parts}
        return {**alone, "layer": all_parts}

    def _fused(self) -> dict:
        return {
            "qkv": lambda x, w: ops.norm_linear(x, self.norm, w[0], EPS),
            "rope": lambda x, w: ops.qk_norm_rope_write_kv(
                x, self.heads(), ops.KVPages(*self.cache), self.slots
            ).flatten(1),
            "o": lambda x, w: ops.linear_add(x, w[1], self.residual),
            "gate_up": lambda x, w: ops.norm_gate_up(x, self.norm, w[2], EPS),
            "down": lambda x, w: ops.linear_add(x, w[3], self.residual),
        }

    def _library(self) -> dict:
        width = (self.config.hidden_size,)

        def rope(x: Tensor, _: tuple) -> Tensor:
            qk = ops.qk_norm_rope(x, self.heads())
            heads, kv_heads = self.num_heads, self.num_kv_heads
            v = x[:, qk.shape[1] * qk.shape[2] :].unflatten(1, (kv_heads, qk.shape[2]))
            for cache, new in zip(self.cache, (qk[:, heads:], v), strict=True):
                cache.flatten(0, 1).index_copy_(0, self.slots, new)
            return qk[:, :heads].flatten(1)

        def gate_up(x: Tensor, w: tuple) -> Tensor:
            gate, up = F.linear(F.rms_norm(x, width, self.norm, EPS), w[2]).chunk(2, dim=1)
            return F.silu(gate) * up

        return {
            "qkv": lambda x, w: F.linear(F.rms_norm(x, width, self.norm, EPS), w[0]),
            "rope": rope,
            "o": lambda x, w: self.residual + F.linear(x, w[1]),
            "gate_up": gate_up,
            "down": lambda x, w: self.residual + F.linear(x, w[3]),
        }

    def floor_us(self) -> dict[str, float]:
        """Microseconds that the bytes of a layer's weights take."""
        names = ("qkv", "o", "gate_up", "down")
        floors = {n: 2 * w.numel() / BANDWIDTH for n, w in zip(names, self.layers[0], strict=True)}
        return {**floors, "rope": 0.0, "layer": sum(floors.values())}


def contract() -> None:
    """cuBLAS as the contract needs it."""
    if DEVICE == "cuda":
        cublas.configure_cuda.__wrapped__()


def stock() -> None:
    """torch's defaults for cuBLAS."""
    if DEVICE == "cpu":
        return
    torch.backends.cuda.preferred_blas_library("cublas")
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = True


def flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--arch", default="qwen3-0.6b" if DEVICE == "cuda" else "tiny")
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 40, 256])


@torch.inference_mode()
def measure(args: argparse.Namespace, report: Report) -> None:
    table = [["sequences", "part", "fused us", "library us", "fused/library", "floor us"]]
    figures: dict[str, dict[str, dict[str, float]]] = {}
    report.figures |= {"arch": args.arch, "rows": figures}
    for rows in args.rows:
        stack = Stack(args.arch, rows)
        layers, floors = stack.config.num_layers, stack.floor_us()
        contract()
        fused = {name: graph_us(run) / layers for name, run in stack.parts(True).items()}
        stock()
        library = {name: graph_us(run) / layers for name, run in stack.parts(False).items()}
        figures[str(rows)] = {}
        for name, us in fused.items():
            figures[str(rows)][name] = {"fused_us": us, "library_us": library[name], "floor_us": floors[name]}
            ratio = f"{us / library[name]:.2f}"
            table.append([str(rows), name, f"{us:.2f}", f"{library[name]:.2f}", ratio, f"{floors[name]:.2f}"])
        report.save()
    contract()
    report.tables.append(table)
