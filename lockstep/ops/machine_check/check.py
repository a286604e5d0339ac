"""Checks whether this machine keeps the bitwise contract, at start-up and at exactly the shapes that a run will use.

On a GPU, every matrix product is compared bit by bit with the single-accumulator chain of a fixed Triton kernel: tiles
must not change a bit, and the library must not split K. A shape whose kernel differs falls back to that Triton kernel
(`choice.overrides`); one whose chain depends on the number of rows has nothing to fall back to, and a run with strict
parity must not start. On a CPU, a row's product must not depend on the number of rows. On both, attention over a paged
cache must have the bits of attention over packed tokens.

Verdicts are cached in the user's cache folder, by package, versions and machine.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Literal, NamedTuple, get_args

import torch

from ...cache import fingerprint as cache_fingerprint
from ...cache import user_folder
from ..activation.operator import silu_mul
from ..linear import choice as linear_choice
from ..linear.choice import CHAIN, Kind
from ..linear.operator import linear, linear_add, linear_fp32, norm_gate_up, norm_linear
from ..native.library import cpu_backend, cpu_build
from ..norm.operator import rms_norm
from .attention import attention_agrees, latent_agrees
from .inputs import make_products_cancel, same_bits, standardize, wide_normal
from .shapes import HeadShape, LatentHeadShape, Product

Outcome = Literal["kept", "replaced", "broken"]

Shape = Product | HeadShape | LatentHeadShape

CPU_ROWS = (1, 2, 3, 4, 7, 8, 15, 16, 17, 32, 33)
CHAIN_ROWS = 4096  # rows of the chain at a time, which bounds the memory beside the product itself
CPU_WEIGHTS = 1 << 22  # elements of a weight, at most, that a CPU is checked with; all columns are alike
KEPT_OUTCOMES = 64  # files of outcomes to keep: one for each version, machine, dtype and number of threads


class MachineReport(NamedTuple):
    """How many shapes were checked, which products now use another kernel, what breaks the contract, and what could be
    used instead."""

    checked: int
    replaced: tuple[str, ...]
    broken: tuple[str, ...]
    remedy: str

    @property
    def holds(self) -> bool:
        """Whether generator and trainer can be bitwise equal on this machine."""
        return not self.broken

    def __str__(self) -> str:
        if self.broken:
            return (
                f"this machine does not keep the bitwise contract for {_abbreviate(self.broken)}; "
                f"use --parity warn or off, or {self.remedy}"
            )
        if self.replaced:
            return (
                f"{self.checked} shapes keep the contract; Triton replaces the library for {_abbreviate(self.replaced)}"
            )
        return f"{self.checked} shapes keep the contract"


def _abbreviate(names: tuple[str, ...]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def computed_products() -> list[Product]:
    """The products that this process has computed on a GPU: after warm-up, exactly those that were captured."""
    return sorted(Product(*key) for key in linear_choice.requested)


def check(
    products: Iterable[Product],
    heads: Iterable[HeadShape | LatentHeadShape],
    device: torch.device,
    dtype: torch.dtype,
    folder: Path | None = None,
) -> MachineReport:
    """Check every shape, or take the verdict of an earlier run on this machine; replace kernels that differ.

    Graphs that were captured before a kernel was replaced have to be captured again.

    Args:
        dtype: the compute dtype.
        folder: where verdicts are kept; by default `gate` in `user_folder.cache_folder()`.
    """
    wanted: dict[str, Shape] = {str(shape): shape for shape in (*products, *heads)}
    path = _outcomes_path(device, dtype, folder)
    outcomes = _load_outcomes(path)
    if unknown := wanted.keys() - outcomes.keys():
        outcomes |= {name: _check_shape(wanted[name], device, dtype) for name in unknown}
        user_folder.write(path, outcomes, keep=KEPT_OUTCOMES)
    replaced = tuple(name for name in wanted if outcomes[name] == "replaced")
    broken = tuple(name for name in wanted if outcomes[name] == "broken")
    _override_kernels(replaced)
    return MachineReport(len(wanted), replaced, broken, _remedy(device, dtype))


def _remedy(device: torch.device, dtype: torch.dtype) -> str:
    """What to use if this machine breaks the contract."""
    if device.type == "cuda":
        return "another torch, Triton or driver version"
    if dtype == torch.float32 and cpu_backend() == "native":
        return "another torch version"
    operators = "the C operators, which are built where lockstep is installed with a C compiler"
    return f"{'' if dtype == torch.float32 else 'float32 and '}{operators}, or another torch version"


def restore_overrides(device: torch.device, dtype: torch.dtype, folder: Path | None = None) -> None:
    """Replace the kernels that an earlier run on this machine found to differ. This is done before graphs are captured,
    since `check` of the products in them (`used`) comes after."""
    outcomes = _load_outcomes(_outcomes_path(device, dtype, folder))
    _override_kernels(name for name, outcome in outcomes.items() if outcome == "replaced")


def rehearse(
    products: Iterable[Product],
    heads: Iterable[HeadShape | LatentHeadShape],
    device: torch.device,
    dtype: torch.dtype,
    folder: Path | None = None,
) -> None:
    """Do what `check` does and discard the outcome: while launches only compile (`ops.precompile`), this compiles the
    kernels that it launches."""
    outcomes = _load_outcomes(_outcomes_path(device, dtype, folder))
    for shape in (*products, *heads):
        if str(shape) not in outcomes:
            _check_shape(shape, device, dtype)


def _outcomes_path(device: torch.device, dtype: torch.dtype, folder: Path | None) -> Path:
    return (folder or user_folder.cache_folder() / "gate") / f"{fingerprint(device, dtype)}.json"


def _load_outcomes(path: Path) -> dict[str, Outcome]:
    raw = None if linear_choice.registered else user_folder.read(path)  # the key does not cover code from outside
    return raw if isinstance(raw, dict) and all(outcome in get_args(Outcome) for outcome in raw.values()) else {}


def _override_kernels(names: Iterable[str]) -> None:
    for name in names:
        if match := re.fullmatch(r"\w+ \d+x(\d+)x(\d+)( with bias)?", name):
            linear_choice.overrides[int(match[1]), int(match[2])] = CHAIN


def _check_shape(shape: Shape, device: torch.device, dtype: torch.dtype) -> Outcome:
    with torch.no_grad(), torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(0)
        if isinstance(shape, HeadShape):
            return "kept" if attention_agrees(shape, device, dtype) else "broken"
        if isinstance(shape, LatentHeadShape):
            return "kept" if latent_agrees(shape, device, dtype) else "broken"
        if device.type == "cuda":
            return _check_cuda_product(shape, device)
        return "kept" if _cpu_product_agrees(shape, dtype) else "broken"


def _check_cuda_product(p: Product, device: torch.device) -> Outcome:
    """Whether the kernel that would compute it has the chain's bits, and the chain's own do not depend on the number
    of rows."""
    from ..linear.triton import chain as chain_of

    x, weight = (standardize(wide_normal(n, p.depth, device=device, dtype=torch.bfloat16)) for n in (p.rows, p.columns))
    norm = 1 + 0.1 * torch.randn(p.depth, device=device).bfloat16()
    residual = wide_normal(p.rows, p.columns, device=device, dtype=torch.bfloat16) if p.kind == "linear_add" else x
    rows = rms_norm(x, norm, 1e-6) if p.kind.startswith("norm") else x
    bias = [wide_normal(p.columns, device=device, dtype=torch.bfloat16)] if p.biased else []
    plain: Kind = "linear_fp32" if p.kind == "linear_fp32" else "linear"
    result = {
        "linear_add": lambda: linear_add(x, weight, residual, *bias),
        "norm_linear": lambda: norm_linear(x, norm, weight, 1e-6, *bias),
        "norm_gate_up": lambda: norm_gate_up(x, norm, weight, 1e-6),
        "linear_fp32": lambda: linear_fp32(x, weight),
        "linear": lambda: linear(x, weight, *bias),
    }[p.kind]()
    outcome: Outcome = "kept"
    for i in range(0, p.rows, CHAIN_ROWS):
        part = rows[i : i + CHAIN_ROWS]
        chain, middle = chain_of(part, weight, plain, *bias), part.shape[0] // 2
        if not same_bits(chain_of(part[middle : middle + 1], weight, plain, *bias), chain[middle : middle + 1]):
            return "broken"
        if p.kind == "norm_gate_up":
            chain = silu_mul(chain)
        if p.kind == "linear_add":
            chain = residual[i : i + CHAIN_ROWS] + chain
        if not same_bits(result[i : i + CHAIN_ROWS], chain):
            outcome = "replaced"
        del chain  # before the next one is allocated
    return outcome


def _cpu_product_agrees(p: Product, dtype: torch.dtype) -> bool:
    """Whether rows have the same bits among few rows as among many, wherever they are in memory."""
    operator = linear_fp32 if p.kind == "linear_fp32" else linear
    device, columns = torch.device("cpu"), min(p.columns, max(CPU_WEIGHTS // p.depth, 1))
    count = max(CPU_ROWS) + 2
    x, weight = (wide_normal(n, p.depth, device=device, dtype=dtype) for n in (count, columns))
    make_products_cancel(x, weight)
    whole = operator(x, weight)
    pieces = [(m, rows) for m in CPU_ROWS for rows in (x[-m:], x[-m:].clone())]
    return all(same_bits(operator(rows, weight), whole[-m:]) for m, rows in pieces)


def fingerprint(device: torch.device, dtype: torch.dtype) -> str:
    """A key of what the bits depend on: package, versions, machine, device, and on a CPU the build of the operators and
    the number of threads."""
    on_cpu = cpu_build(), torch.get_num_threads(), torch.__config__.show()
    about = torch.cuda.get_device_name(device) if device.type == "cuda" else on_cpu
    return cache_fingerprint.key("machine check", dtype, about, *linear_choice.registered, device=device.type)
