"""Does this machine keep the contract? Checked at start-up, at exactly the shapes that a run will compute.

On a GPU every matrix product is compared, word by word, with the one-accumulator chain of a fixed Triton kernel: tiles
must not change a bit, and the library must not split K. A shape whose kernel differs falls back to that Triton kernel
(`linear_table.overrides`); one whose chain depends on the number of rows has nothing to fall back to, and strict parity
must not start. On a CPU a row's product must not depend on how many rows there are. On both, attention over a paged
cache must be attention over packed tokens.

Verdicts are kept in the user's cache folder, by machine and versions, for what was checked.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import re
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from . import attention, fused, linear_table, user_cache
from .attention import attention_packed, attention_paged
from .linear import linear, linear_fp32
from .linear_table import CHAIN, Kind
from .logprobs import CHUNK
from .native.library import cpu_backend
from .rows import rms_norm, silu_mul

Outcome = Literal["kept", "replaced", "broken"]

CPU_ROWS = (1, 2, 3, 4, 7, 8, 15, 16, 17)
CPU_WEIGHTS = 1 << 22  # elements of the weights that a CPU is checked with; columns are alike
SOURCES = (
    *("gate.py", "linear_table.py", "linear_table.json", "backend.py"),
    *("kernels/linear.py", "kernels/linear_async.py", "kernels/fused.py"),
)


class Product(NamedTuple):
    """`rows` x `depth` times `columns` x `depth`; `columns` counts the weight's rows, gate and up together."""

    kind: Kind
    rows: int
    columns: int
    depth: int

    def __str__(self) -> str:
        return f"{self.kind} {self.rows}x{self.columns}x{self.depth}"


class Heads(NamedTuple):
    """The shape of an attention layer."""

    heads: int
    kv_heads: int
    head_dim: int

    def __str__(self) -> str:
        return f"attention {self.heads}/{self.kv_heads}x{self.head_dim}"


class Verdict(NamedTuple):
    """How many shapes were looked at, which products another kernel computes now, and what breaks the contract."""

    checked: int
    replaced: tuple[str, ...]
    broken: tuple[str, ...]

    @property
    def holds(self) -> bool:
        """Whether generator and trainer can agree bit by bit on this machine."""
        return not self.broken

    def __str__(self) -> str:
        if self.broken:
            return (
                f"this machine does not keep the bitwise contract for {_several(self.broken)}; "
                "use --parity warn or off, or another torch, Triton or driver version"
            )
        if self.replaced:
            return f"{self.checked} shapes keep the contract; Triton replaces the library for {_several(self.replaced)}"
        return f"{self.checked} shapes keep the contract"


def _several(names: tuple[str, ...]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def decoder_products(
    rows: Collection[int],
    trained: Collection[int],
    scored: Collection[int],
    hidden: int,
    heads: Heads,
    feed_forward: int,
    vocabulary: int,
) -> list[Product]:
    """The products of a dense decoder.

    Args:
        rows: tokens of a pass without gradient: decode and prefill buckets.
        trained: packed tokens of a pass with gradient, whose operators run separately.
        scored: rows of the LM head, which sees a chunk of them at a time.
    """
    qkv, attended = (heads.heads + 2 * heads.kv_heads) * heads.head_dim, heads.heads * heads.head_dim
    shapes: dict[tuple[int, int], Kind] = {
        (qkv, hidden): "norm_linear",
        (hidden, attended): "linear_add",
        (2 * feed_forward, hidden): "norm_gate_up",
        (hidden, feed_forward): "linear_add",
    }
    fused_kinds = [Product(kind, m, n, k) for m in sorted({*rows}) for (n, k), kind in shapes.items()]
    plain = [Product("linear", m, n, k) for m in sorted({*trained}) for n, k in shapes]
    chunks = {piece for m in scored for piece in (min(m, CHUNK), m % CHUNK) if piece}
    return [*fused_kinds, *plain, *(Product("linear_fp32", m, vocabulary, hidden) for m in sorted(chunks))]


def used() -> list[Product]:
    """The products that this process has computed on a GPU: after warm-up, exactly those that were captured."""
    return sorted(Product(*key) for key in linear_table.used)


def check(
    products: Iterable[Product],
    heads: Iterable[Heads],
    device: torch.device,
    dtype: torch.dtype,
    folder: Path | None = None,
) -> Verdict:
    """Check every shape, or take the verdict of an earlier run on this machine; replace what does not hold.

    Graphs that were captured before a shape was replaced have to be made again.

    Args:
        dtype: the compute dtype.
        folder: where verdicts are kept; default `user_cache.cache_folder()`.
    """
    shapes: list[Product | Heads] = [*products, *heads]
    wanted = {str(shape): shape for shape in shapes}
    path = _path(device, dtype, folder)
    outcomes = _known(path)
    if due := wanted.keys() - outcomes.keys():
        outcomes |= {name: _check(wanted[name], device, dtype) for name in due}
        user_cache.write(path, outcomes)
    _replace(name for name in wanted if outcomes[name] == "replaced")
    found = {outcome: tuple(n for n in wanted if outcomes[n] == outcome) for outcome in get_args(Outcome)}
    return Verdict(len(wanted), found["replaced"], found["broken"])


def restore(device: torch.device, dtype: torch.dtype, folder: Path | None = None) -> None:
    """Replace what an earlier run on this machine found to differ: before graphs are made, as `check` of what they
    hold (`used`) comes after."""
    outcomes = _known(_path(device, dtype, folder))
    _replace(name for name, outcome in outcomes.items() if outcome == "replaced")


def rehearse(
    products: Iterable[Product],
    heads: Iterable[Heads],
    device: torch.device,
    dtype: torch.dtype,
    folder: Path | None = None,
) -> None:
    """Go through the motions of `check`, and forget what is found: where launches only compile
    (`kernels.precompile`), this compiles what it launches."""
    outcomes = _known(_path(device, dtype, folder))
    shapes: list[Product | Heads] = [*products, *heads]
    for shape in shapes:
        if str(shape) not in outcomes:
            _check(shape, device, dtype)


def _path(device: torch.device, dtype: torch.dtype, folder: Path | None) -> Path:
    """The file of the outcomes on this machine, by shape."""
    return (folder or user_cache.cache_folder()) / f"gate-{fingerprint(device, dtype)[:32]}.json"


def _known(path: Path) -> dict[str, Outcome]:
    raw = user_cache.read(path)
    return raw if isinstance(raw, dict) and all(outcome in get_args(Outcome) for outcome in raw.values()) else {}


def _replace(names: Iterable[str]) -> None:
    for name in names:
        if found := re.fullmatch(r"\w+ \d+x(\d+)x(\d+)", name):
            linear_table.overrides[int(found[1]), int(found[2])] = CHAIN


def _check(shape: Product | Heads, device: torch.device, dtype: torch.dtype) -> Outcome:
    with torch.no_grad(), torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(0)
        if isinstance(shape, Heads):
            return "kept" if _attention_agrees(shape, device, dtype) else "broken"
        if device.type == "cuda":
            return _cuda_product(shape, device)
        return "kept" if _cpu_product(shape, dtype) else "broken"


def wide(*shape: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """N(0, 1) * exp(2 N(0, 1)): exponents wide enough for a change in the order of additions to show."""
    return (torch.randn(*shape, device=device) * torch.exp(2 * torch.randn(*shape, device=device))).to(dtype)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equality of words."""
    words = {2: torch.int16, 4: torch.int32}[a.element_size()]
    return torch.equal(a.contiguous().view(words), b.contiguous().view(words))


def _cuda_product(p: Product, device: torch.device) -> Outcome:
    """Whether the kernel that would compute it has the chain's bits, and the chain the same for each of its rows."""
    from .kernels.linear import product

    x, weight = (wide(n, p.depth, device=device, dtype=torch.bfloat16) for n in (p.rows, p.columns))
    x, weight = x / x.float().std().bfloat16(), weight / weight.float().std().bfloat16()
    norm = 1 + 0.1 * torch.randn(p.depth, device=device).bfloat16()
    residual = wide(p.rows, p.columns, device=device, dtype=torch.bfloat16) if p.kind == "linear_add" else x
    rows = rms_norm(x, norm, 1e-6) if p.kind.startswith("norm") else x
    chain = product(rows, weight, CHAIN, torch.float32 if p.kind == "linear_fp32" else None)
    some = rows[p.rows // 2 : p.rows // 2 + 1]
    if not same_bits(product(some, weight, CHAIN, chain.dtype), chain[p.rows // 2 : p.rows // 2 + 1]):
        return "broken"
    computed, expected = _computed(p.kind, x, weight, norm, residual), _expected(p.kind, chain, residual)
    return "kept" if same_bits(computed, expected) else "replaced"


def _computed(kind: Kind, x: Tensor, weight: Tensor, norm: Tensor, residual: Tensor) -> Tensor:
    """By the operator of that kind, and so by what the table chooses."""
    if kind == "linear_fp32":
        return linear_fp32(x, weight)
    if kind == "linear_add":
        return fused.linear_add(x, weight, residual)
    if kind == "norm_linear":
        return fused.norm_linear(x, norm, weight, 1e-6)
    return fused.norm_gate_up(x, norm, weight, 1e-6) if kind == "norm_gate_up" else linear(x, weight)


def _expected(kind: Kind, chain: Tensor, residual: Tensor) -> Tensor:
    """From the chain, by separate operators."""
    if kind == "linear_add":
        return residual + chain
    return silu_mul(chain) if kind == "norm_gate_up" else chain


def _cpu_product(p: Product, dtype: torch.dtype) -> bool:
    """Whether rows have the same bits among few as among many."""
    operator = linear_fp32 if p.kind == "linear_fp32" else linear
    device, columns = torch.device("cpu"), min(p.columns, max(CPU_WEIGHTS // p.depth, 1))
    count = max(CPU_ROWS) + 2
    x, weight = (wide(n, p.depth, device=device, dtype=dtype) for n in (count, columns))
    whole = operator(x, weight)
    return all(same_bits(operator(x[-m:].clone(), weight), whole[-m:]) for m in CPU_ROWS)


def _attention_agrees(shape: Heads, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether decoding, a token at a time and all in one batch, has the bits of one packed pass; so for a prompt's
    second chunk."""
    tokens, page = attention.KEY_TILE + 6, 16
    qk = torch.randn(tokens, shape.heads + shape.kv_heads, shape.head_dim, device=device).to(dtype)
    q, k, v = qk[:, : shape.heads], qk[:, shape.heads :], wide(tokens, *shape[1:], device=device, dtype=dtype)

    def ints(*values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    packed = attention_packed(q, k, v, ints(0, tokens), ints(0), ints(0), tokens)
    pages = -(-tokens // page)
    table = torch.arange(pages, dtype=torch.int32, device=device).flip(0).unsqueeze(0)
    caches = [_paged(x, table[0], page) for x in (k, v)]
    steps = torch.arange(tokens + 1, dtype=torch.int32, device=device)
    tables = table.expand(tokens, -1).contiguous()
    decoded = attention_paged(q, *caches, tables, steps, steps[1:].clone(), 1, tokens)
    chunk = tokens // 3
    rest = attention_paged(q[chunk:], *caches, table, ints(0, tokens - chunk), ints(tokens), tokens - chunk, tokens)
    return same_bits(decoded, packed) and same_bits(rest, packed[chunk:])


def _paged(x: Tensor, pages: Tensor, page: int) -> Tensor:
    """A sequence's keys or values in the pages of its block table."""
    cache = torch.zeros(len(pages), page, *x.shape[1:], dtype=x.dtype, device=x.device)
    position = torch.arange(len(x), device=x.device)
    cache[pages[position // page].long(), position % page] = x
    return cache


def fingerprint(device: torch.device, dtype: torch.dtype) -> str:
    """What the bits depend on: hardware, driver, versions, and the sources that choose and compute."""
    sources = hashlib.sha256()
    for name in SOURCES:
        path = Path(__file__).parent / name
        sources.update(path.read_bytes() if path.exists() else b"")
    facts = [str(dtype), torch.__version__, sources.hexdigest()]
    if device.type == "cuda":
        import triton

        facts += [torch.cuda.get_device_name(device), driver_version(), str(torch.version.cuda), triton.__version__]
    else:
        facts += [cpu_backend(), torch.backends.cpu.get_cpu_capability(), torch.__config__.show()]
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()


@functools.cache
def driver_version() -> str:
    """The driver's version, by NVML; empty when that is not there."""
    version = ctypes.create_string_buffer(96)
    with contextlib.suppress(OSError, AttributeError):
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        nvml.nvmlInit_v2()
        nvml.nvmlSystemGetDriverVersion(version, ctypes.c_uint(len(version)))
        nvml.nvmlShutdown()
    return version.value.decode()
