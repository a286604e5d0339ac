"""Whether attention over a paged cache has the bits of attention over packed tokens on this machine, for `check.py`.

Attention's sums are float32 and rounded once, so in bfloat16 few results show that two sums were added in different
orders. On a CPU, whose libraries choose the order, there are therefore also inputs whose sums cancel and leave their
rounding errors; a GPU runs kernels of ours, which `tests/gpu` compares on many more inputs.

Shape suffixes: T tokens, N query heads, K key/value heads, H head dim, R latent rank, P rotated dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from ..attention.operator import KEY_TILE, attention_packed, attention_paged
from ..mla.operator import mla_packed, mla_paged
from ..records import NO_GROUPS, PLAIN, AttentionScores, KVPages, Latent, Packed, Paged
from .inputs import make_products_cancel, random_pairs, same_bits, wide_normal
from .shapes import HeadShape, LatentHeadShape

KINDS = ("ordinary", "scores", "values")
TOKENS, PAGE = KEY_TILE + 6, 16
PAIRED = KEY_TILE // 2
WINDOW, SCALE = KEY_TILE - 3, 0.3  # of a layer with `has_score_options`: some queries do not see the first keys
LARGE = 256.0  # factor on queries and keys whose products cancel, so that scores' errors exceed bfloat16's


def attention_agrees(shape: HeadShape, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether decoding, with one sequence per token in one batch, and the second chunk of a prompt have the bits of one
    packed pass."""
    kinds = [PLAIN]
    if shape.has_score_options:
        kinds.append(AttentionScores(torch.randn(shape.heads, device=device).to(dtype), WINDOW, SCALE))
    return all(_heads_agree(*inputs, scores) for scores in kinds for inputs in _probes(shape, device, dtype))


def latent_agrees(shape: LatentHeadShape, device: torch.device, dtype: torch.dtype) -> bool:
    return all(_latents_agree(*inputs) for inputs in _latent_probes(shape, device, dtype))


def _probes(shape: HeadShape, device: torch.device, dtype: torch.dtype) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Queries, keys and values: ordinary ones, some whose scores cancel, and some whose weighted values cancel."""
    for kind in KINDS if device.type == "cpu" else KINDS[:1]:
        qk = torch.randn(TOKENS, shape.heads + shape.kv_heads, shape.head_dim, device=device).to(dtype)
        q, k = qk[:, : shape.heads], qk[:, shape.heads :]
        v = wide_normal(TOKENS, shape.kv_heads, shape.head_dim, device=device, dtype=dtype)
        if kind == "scores":
            make_products_cancel(q, k)
            qk *= LARGE
        if kind == "values":
            _make_values_cancel(k, v)
        yield q, k, v


def _latent_probes(
    shape: LatentHeadShape, device: torch.device, dtype: torch.dtype
) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Absorbed and rotated queries, latents and rotated keys, like `_probes`. Latents are keys too, so the absorbed
    queries are zero where latents cancel as values."""
    for kind in KINDS:
        q = torch.randn(TOKENS, shape.heads, shape.kv_rank, device=device).to(dtype)
        rotated = torch.randn(TOKENS, shape.heads + 1, shape.rope_dim, device=device).to(dtype)
        latent, k_rope = wide_normal(TOKENS, shape.kv_rank, device=device, dtype=dtype), rotated[:, shape.heads]
        if kind == "scores":
            make_products_cancel(q, latent)
            q *= LARGE
        if kind == "values":
            _make_values_cancel(k_rope, latent)
            q.zero_()
        yield q, rotated[:, : shape.heads], latent, k_rope


def _make_values_cancel(k: Tensor, v: Tensor) -> None:
    """Make the first `PAIRED` values cancel, in pairs with equal keys, and the others zero, in place. Later queries are
    left with rounding errors."""
    first, second, _ = random_pairs(PAIRED)
    k[second], v[second] = k[first], -v[first]
    v[PAIRED:] = 0


def _heads_agree(q: Tensor, k: Tensor, v: Tensor, scores: AttentionScores) -> bool:
    cache = KVPages(_to_pages(k), _to_pages(v))
    return _roles_agree(
        lambda layout: attention_packed(q, k, v, layout, scores),
        lambda rows, layout: attention_paged(q[rows], cache, layout, NO_GROUPS, scores),
        q.device,
    )


def _latents_agree(q_TNR: Tensor, q_rope_TNP: Tensor, latent_TR: Tensor, k_rope_TP: Tensor) -> bool:
    cache, scale = _to_pages(torch.cat((latent_TR, k_rope_TP), dim=1)), (q_TNR.shape[2] + q_rope_TNP.shape[2]) ** -0.5
    return _roles_agree(
        lambda layout: mla_packed(Latent(q_TNR, q_rope_TNP, latent_TR, k_rope_TP, scale), layout),
        lambda rows, layout: mla_paged(q_TNR[rows], q_rope_TNP[rows], cache, scale, layout),
        q_TNR.device,
    )


def _roles_agree(packed: Callable[..., Tensor], paged: Callable[..., Tensor], device: torch.device) -> bool:
    """Compare both roles on one sequence; `packed` takes a layout, `paged` the queries' rows and the sequences."""

    def ints(*values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    whole = packed(Packed(ints(0, TOKENS), ints(0), ints(0), TOKENS))
    table = _page_order(device).int().unsqueeze(0)
    steps = torch.arange(TOKENS + 1, dtype=torch.int32, device=device)
    decoded = paged(slice(None), Paged(table.expand(TOKENS, -1).contiguous(), steps, steps[1:].clone(), 1, TOKENS))
    chunk = TOKENS // 3
    rest = paged(slice(chunk, None), Paged(table, ints(0, TOKENS - chunk), ints(TOKENS), TOKENS - chunk, TOKENS))
    return same_bits(decoded, whole) and same_bits(rest, whole[chunk:])


def _page_order(device: torch.device) -> Tensor:
    """The sequence's pages, out of order."""
    return torch.arange(-(-TOKENS // PAGE), device=device).flip(0)


def _to_pages(x: Tensor) -> Tensor:
    """One row per token, placed in the sequence's pages."""
    pages = _page_order(x.device)
    cache = torch.zeros(len(pages), PAGE, *x.shape[1:], dtype=x.dtype, device=x.device)
    position = torch.arange(len(x), device=x.device)
    cache[pages[position // PAGE], position % PAGE] = x
    return cache
