"""Fused linear layers on a GPU: the words of the separate operators, whatever the tile, and in a replayed graph.

Shapes are Qwen3-0.6B's and 1.7B's. Inputs have wide exponents, so that a missing rounding or another order shows.
"""

import itertools

import pytest
import torch
from torch import Tensor
from values import wide

from lockstep import ops
from lockstep.ops.attention import triton_decode
from lockstep.ops.linear import cublas
from lockstep.ops.linear.choice import Choice

DEVICE = "cuda"
ROWS = (1, 2, 7, 16, 40, 64, 100, 256, 700)
TMA_ROWS = (3, 8, 24, 33, 40, 63, 64, 65, 100, 127, 128, 129, 256, 700)
TILES = (
    Choice("pipelined", 16, 16, 128, 4, 8, early=True),
    Choice("pipelined", 16, 32, 256, 4, 3),
    Choice("pipelined", 32, 32, 128, 4, 5),
    Choice("pipelined", 32, 64, 64, 4, 4),
    Choice("pipelined", 64, 16, 128, 4, 4),
    Choice("pipelined", 64, 32, 64, 4, 8, early=True),
    Choice("pipelined", 64, 64, 128, 4, 4),
    Choice("pipelined", 128, 64, 64, 4, 5),
    Choice("pipelined", 128, 128, 64, 8, 4),
)
ASYNC_TILES = (
    Choice("async", 16, 16, 128, 4, 6, 4),
    Choice("async", 16, 32, 256, 4, 3, 3),
    Choice("async", 16, 64, 64, 4, 10, 8),
    Choice("async", 64, 8, 128, 4, 32, 3),
    Choice("async", 64, 32, 64, 4, 8, 4),
    Choice("async", 64, 64, 128, 4, 3, 3),
    Choice("async", 64, 16, 256, 4, 12, 3),
    Choice("async", 64, 128, 128, 4, 4, 4),
    Choice("async", 64, 32, 256, 4, 5, 4),
    Choice("async", 128, 64, 64, 8, 4, 4),
)
TMA_TILES = (
    Choice("tma", 64, 16, 256, 4, 5),
    Choice("tma", 64, 32, 128, 4, 6),
    Choice("tma", 64, 64, 64, 4, 3),
    Choice("tma", 64, 128, 128, 4, 2),
    Choice("tma", 128, 32, 128, 8, 5),
    Choice("tma", 128, 128, 64, 8, 4),
)
SHARED_BYTES = 227 * 1024  # that a program may have
HEADS, KV_HEADS, HEAD_DIM = 16, 8, 128


def separate(x: Tensor, norm: Tensor, weight: Tensor, gated: bool) -> Tensor:
    with torch.enable_grad():
        return (ops.norm_gate_up if gated else ops.norm_linear)(x, norm, weight, 1e-6)


@pytest.mark.parametrize(
    ("n", "k"), [(4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072), (2048, 6144), (128, 2048)]
)
def test_every_tile_is_one_chain(census, n, k):
    from lockstep.ops.linear import triton as linear_triton

    x, weight, residual = wide(max(ROWS), k), wide(n, k), wide(max(ROWS), n)
    chain, chain_fp32 = linear_triton.chain(x, weight), linear_triton.chain(x, weight, "linear_fp32")
    for m in ROWS:
        library = cublas.cublaslt_linear(x[:m], weight)
        assert census("linear: cuBLASLt = one chain", library, chain[:m]) == 0
        float32 = cublas.cublaslt_linear(x[:m], weight, torch.float32)
        assert census("linear_fp32: cuBLASLt = one chain", float32, chain_fp32[:m]) == 0
        for tile in TILES:
            plain = linear_triton.run("linear", tile, x[:m], weight)
            assert census("linear: any tile = one chain", plain, chain[:m]) == 0
            added = linear_triton.run("linear_add", tile, x[:m], weight, residual[:m])
            assert census("linear_add: any tile = separate", added, residual[:m] + chain[:m]) == 0


def forms(x: Tensor, weight: Tensor, residual: Tensor, tile: Choice) -> dict[str, Tensor]:
    """What a tile makes of its three forms, as far as they fit."""
    from lockstep.ops.linear.kernels import KERNELS

    run = KERNELS[tile.kernel].run
    made = {"plain": run("norm_linear", tile, x, weight), "add": run("linear_add", tile, x, weight, residual)}
    staged = (tile.x_stages or tile.num_stages) * tile.block_m + tile.num_stages * 2 * tile.block_n
    if 2 * staged * tile.block_k < SHARED_BYTES:  # gate and up double the weights
        made["gated"] = run("norm_gate_up", tile, x, weight)
    return made


def are_one_chain(census, name: str, cases: list, x: Tensor, weight: Tensor, residual: Tensor) -> None:
    """All forms of all cases, of a number of rows and a tile each."""
    from lockstep.ops.linear import triton as linear_triton
    from lockstep.ops.precompile import compile_only

    with compile_only():  # side by side
        for m, tile in cases:
            forms(x[:m], weight, residual[:m], tile)
    for m, tile in cases:
        chain = linear_triton.chain(x[:m], weight)
        expected = {"plain": chain, "add": residual[:m] + chain, "gated": ops.silu_mul(chain)}
        for form, found in forms(x[:m], weight, residual[:m], tile).items():
            assert census(f"{name}, {form}", found, expected[form]) == 0


@pytest.mark.parametrize(("n", "k"), [(4096, 1024), (1024, 2048), (1024, 3072), (2048, 128)])
def test_every_asynchronous_tile_is_one_chain(census, n, k):
    x, weight, residual = wide(max(ROWS), k), wide(n, k) * 0.02, wide(max(ROWS), n)
    cases = [(m, tile) for m in ROWS for tile in ASYNC_TILES if k % tile.block_k == 0]
    are_one_chain(census, "linear, asynchronous", cases, x, weight, residual)


@pytest.mark.parametrize(("n", "k"), [(4096, 1024), (1024, 3072), (1040, 256)])
def test_every_tile_of_the_copy_engine_is_one_chain(census, n, k):
    rows = max(TMA_ROWS)
    x, weight, residual = wide(rows, k + 16)[:, 16:], wide(n, k) * 0.02, wide(rows, n)
    tiles = [tile for tile in TMA_TILES if k // tile.block_k > 1]
    cases = [(m, tile) for m in TMA_ROWS for tile in tiles]
    are_one_chain(census, "linear by TMA", cases, x, weight, residual)


@pytest.mark.parametrize(
    ("n", "k"), [(1536, 8960), (3584, 18944), (4608, 3584), (5120, 2880), (512, 12288), (768, 4096), (16384, 2048)]
)
def test_what_the_rule_chooses_is_one_chain(census, n, k):
    from lockstep.ops.linear import choice as linear_choice
    from lockstep.ops.linear import triton as linear_triton
    from lockstep.ops.linear.kernels import KERNELS
    from lockstep.ops.precompile import compile_only

    rows = 1, 8, 9, 16, 17, 31, 32, 33, 40, 64, 65, 128
    x, weight, residual = wide(max(rows), k), wide(n, k) * 0.02, wide(max(rows), n)
    cases = list(itertools.product(rows, ("linear", "linear_add", "norm_linear", "norm_gate_up", "linear_fp32")))

    def made(m: int, kind: str) -> Tensor:
        tile = linear_choice.choose_by_rule(kind, m, n, k)
        return KERNELS[tile.kernel].run(kind, tile, x[:m], weight, residual[:m] if kind == "linear_add" else None)

    with compile_only():
        for case in cases:
            made(*case)
    for m, kind in cases:
        chain = linear_triton.chain(x[:m], weight, "linear_fp32" if kind == "linear_fp32" else "linear")
        if kind == "linear_add":
            chain = residual[:m] + chain
        elif kind == "norm_gate_up":
            chain = ops.silu_mul(chain)
        assert census(f"{kind}, by the rule", made(m, kind), chain) == 0


@pytest.mark.parametrize(("n", "k"), [(1024, 2048), (1024, 3072), (2560, 4096)])
def test_linear_add_is_separate(census, n, k):
    x, weight, residual = wide(max(ROWS), k), wide(n, k), wide(max(ROWS), n)
    for m in ROWS:
        with torch.no_grad():
            fused = ops.linear_add(x[:m], weight, residual[:m])
        expected = residual[:m] + ops.linear(x[:m], weight)
        assert census("linear_add = linear, add", fused, expected) == 0
    unrounded = (residual.float() + ops.linear(x.float().bfloat16(), weight).float()).bfloat16()
    exact = (residual.double() + x.double() @ weight.double().t()).bfloat16()
    assert census("linear_add rounds the product", ops.linear(x, weight) + residual, unrounded) == 0
    assert census("CONTROL linear_add: product not rounded", unrounded, exact) > 0


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("n", "k"), [(4096, 1024), (6144, 1024), (4096, 2048), (512, 96)])
def test_norm_layers_are_separate(census, n, k, gated):
    from lockstep.ops.linear import triton as linear_triton

    x, norm, weight = wide(max(ROWS), k), wide(k), wide(n, k) * 0.02
    name = "norm_gate_up" if gated else "norm_linear"
    for m in ROWS:
        expected = separate(x[:m], norm, weight, gated)
        with torch.no_grad():
            fused = getattr(ops, name)(x[:m], norm, weight, 1e-6)
        assert census(f"{name} = separate", fused, expected) == 0
        normed = ops.rms_norm(x[:m], norm, 1e-6)
        for tile in TILES:
            if gated and (tile.block_m + 2 * tile.block_n) * tile.block_k * tile.num_stages * 2 < 220 * 1024:
                one = linear_triton.run("norm_gate_up", tile, normed, weight)
                assert census(f"{name}: any tile = separate", one, expected) == 0
    strided = torch.cat((x, torch.full_like(x, torch.nan)), dim=1)[:, :k]
    with torch.no_grad():
        assert (
            census(
                f"{name}: view = contiguous",
                getattr(ops, name)(strided[:7], norm, weight, 1e-6),
                separate(x[:7], norm, weight, gated),
            )
            == 0
        )


@pytest.mark.parametrize("norms", [True, False])
def test_write_kv_inside_is_write_kv_after(census, norms):
    tokens = 257
    qkv = wide(tokens, (HEADS + 2 * KV_HEADS) * HEAD_DIM)
    weights = (wide(HEAD_DIM), wide(HEAD_DIM)) if norms else (None, None)
    inv_freq = 1e6 ** (-torch.arange(0, HEAD_DIM, 2, device=DEVICE) / HEAD_DIM)
    table = ops.rope_table(torch.randint(0, 4096, (tokens,), device=DEVICE), inv_freq)
    slots = torch.randperm(40 * 16, device=DEVICE)[:tokens]
    caches, expected = (
        [torch.zeros(40, 16, KV_HEADS, HEAD_DIM, device=DEVICE).bfloat16() for _ in range(2)] for _ in range(2)
    )
    for m in (1, 40, tokens):
        arguments = (*weights, table[:m], HEADS, KV_HEADS, 1e-6)
        with torch.no_grad():
            q = ops.qk_norm_rope_write_kv(qkv[:m], ops.Rotation(*arguments), ops.KVPages(*caches), slots[:m])
        qk = ops.qk_norm_rope(qkv[:m], ops.Rotation(*arguments))
        v = qkv[:m, -KV_HEADS * HEAD_DIM :].unflatten(1, (KV_HEADS, HEAD_DIM))
        ops.write_kv(qk[:, HEADS:], v, ops.KVPages(*expected), slots[:m])
        assert census("qk_norm_rope_write_kv: queries = separate", q, qk[:, :HEADS]) == 0
        for cache, e in zip(caches, expected, strict=True):
            assert census("qk_norm_rope_write_kv: cache = separate", cache, e) == 0


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "norms", "offset"),
    [
        (16, 8, 128, True, 0.0),
        (32, 8, 64, False, 0.0),
        (5, 1, 24, True, 0.0),
        (16, 1, 128, True, 0.0),
        (8, 4, 256, True, 1.0),
    ],
)
def test_decode_is_its_parts(census, heads, kv_heads, head_dim, norms, offset):
    """Norm, rotation and cache write inside attention, across splits, beside them apart."""
    contexts = [1, 16, 17, 63, 64, 65, 200, 700, 4095, 4096, 4097, 8200]
    count, page, pages = len(contexts), 16, -(-max(contexts) // 16)
    context = torch.tensor(contexts, device=DEVICE, dtype=torch.int32)
    table = torch.randperm(count * pages, device=DEVICE).int().view(count, pages)
    position = context.long() - 1
    slots = table.gather(1, (position // page).unsqueeze(1)).squeeze(1) * page + position % page
    weights = (wide(head_dim), wide(head_dim)) if norms else (None, None)
    rotation = *weights, torch.randn(count, head_dim, device=DEVICE), heads, kv_heads, 1e-6
    caches = torch.randn(2, count * pages, page, kv_heads, head_dim, device=DEVICE).bfloat16()
    starts, expected = torch.arange(count + 1, device=DEVICE).int(), caches.clone()
    for rows, bound in ((1, 16), (8, 700), (count, 8200)):
        for _ in range(3):  # one after the other: each writes what the one before read
            qkv = wide(count, (heads + 2 * kv_heads) * head_dim)
            own = ops.Rotation(*weights, rotation[2][:rows], *rotation[3:])
            with torch.no_grad():
                contexts = ops.Contexts(table[:rows], context[:rows], bound)
                cache, scores = ops.KVPages(*caches), (ops.NO_GROUPS, ops.PLAIN, offset)
                out = ops.attention_decode(qkv[:rows], own, cache, slots[:rows], contexts, *scores)
                q = ops.qk_norm_rope_write_kv(qkv[:rows], own, ops.KVPages(*expected), slots[:rows], offset)
                apart = ops.attention_paged(
                    q, ops.KVPages(*expected), ops.Paged(table[:rows], starts[: rows + 1], context[:rows], 1, bound)
                )
            assert census("attention_decode = norm, rotate, write, attend", out, apart) == 0
            assert census("attention_decode: cache", caches, expected) == 0
            assert not out.isnan().any()


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "norms", "page"),
    [(32, 8, 128, True, 16), (16, 8, 128, True, 64), (32, 8, 64, False, 16), (15, 1, 128, True, 48)],
)
def test_both_decode_kernels_have_the_same_words(census, monkeypatch, heads, kv_heads, head_dim, norms, page):
    """A tile of keys a warp, beside all warps on one tile; behind a row's end there is NaN."""
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("only one of them runs here")
    for lengths in ([1, 62, 64, 65, 129, 255, 256, 257, 513, 769, 1000], [300, 4095, 4096, 4097, 8200]):
        count, pages = len(lengths), -(-max(lengths) // page)
        context = torch.tensor(lengths, device=DEVICE, dtype=torch.int32)
        table = torch.randperm(count * pages, device=DEVICE).int().view(count, pages)
        position = context.long() - 1
        slots = table.gather(1, (position // page).unsqueeze(1)).squeeze(1) * page + position % page
        weights = (wide(head_dim), wide(head_dim)) if norms else (None, None)
        rotation = ops.Rotation(*weights, torch.randn(count, head_dim, device=DEVICE), heads, kv_heads, 1e-6)
        caches = torch.randn(2, count * pages, page, kv_heads, head_dim, device=DEVICE).bfloat16()
        rows = table.long().unsqueeze(2) * page + torch.arange(page, device=DEVICE)
        behind = torch.arange(pages * page, device=DEVICE) >= context.unsqueeze(1)
        caches.flatten(1, 2)[:, rows.view(count, -1)[behind]] = torch.nan
        qkv, expected = wide(count, (heads + 2 * kv_heads) * head_dim), caches.clone()
        contexts, out = ops.Contexts(table, context, max(lengths)), {}
        for by_warp, cache in ((True, caches), (False, expected)):
            with monkeypatch.context() as patch:
                patch.setattr(triton_decode.hopper_decode, "pays", lambda *_, by_warp=by_warp: by_warp)
                out[by_warp] = triton_decode.attention_decode(qkv, rotation, ops.KVPages(*cache), slots, contexts)
        assert census("decode: a tile a warp = a tile for all warps", out[True], out[False]) == 0
        assert census("decode: a tile a warp, cache", caches, expected) == 0
        assert not out[True].isnan().any()


@pytest.mark.parametrize("context", [64, 65, 128, 192, 256, 257, 320, 512, 4096, 4160])
def test_both_decode_kernels_have_the_same_words_at_the_extremes(census, monkeypatch, context):
    """Infinities, NaN, the smallest numbers and zeros of both signs within the context; an output whose first keys'
    share underflows to -0 and whose last keys' values are zeros; page numbers of nothing behind the row's end."""
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("only one of them runs here")
    page, heads, kv_heads, head_dim = 16, 8, 2, 128
    pages, at = -(-context // page), context // 2
    q = wide(4, heads, head_dim)
    caches = torch.randn(2, 4 * pages, page, kv_heads, head_dim, device=DEVICE).bfloat16()
    k, v = caches.view(2, 4, pages * page, kv_heads, head_dim)
    k[0, at, 0, 0], v[0, at, 0, 3], v[0, at, 0, 4], v[0, at, 0, 5] = torch.inf, torch.inf, -torch.inf, torch.nan
    k[0, 0, 1], v[1, at, 0] = torch.nan, torch.inf
    v[1, :, 1] = 1e-39
    v[1, ::2, 1] = -0.0
    q[2], k[2], v[2] = 1, -16, -1
    k[2, at // 64 * 64 :], v[2, at // 64 * 64 :] = 16, -0.0
    q[3], k[3] = 1, -torch.inf
    table = torch.full((4, pages + 20), 1 << 26, dtype=torch.int32, device=DEVICE)
    table[:, :pages] = torch.arange(4 * pages, device=DEVICE).int().view(4, pages)
    lengths, starts = torch.full((4,), context, dtype=torch.int32, device=DEVICE), torch.arange(5, device=DEVICE).int()
    out = {}
    for by_warp in (True, False):
        with monkeypatch.context() as patch:
            patch.setattr(triton_decode.hopper_decode, "pays", lambda *_, by_warp=by_warp: by_warp)
            out[by_warp] = ops.attention_paged(q, ops.KVPages(*caches), ops.Paged(table, starts, lengths, 1, context))
    assert census("decode: a tile a warp = a tile for all warps, extremes", out[True], out[False]) == 0
    alone = ops.PrefixGroups(torch.arange(4, device=DEVICE).int().view(4, 1), lengths)
    grouped = ops.attention_paged(q, ops.KVPages(*caches), ops.Paged(table, starts, lengths, 1, context), alone)
    assert census("decode: groups, a tile a warp = alone, extremes", grouped, out[True]) == 0


@pytest.mark.parametrize("m", [1, 40, 256])
def test_captured_layers_are_eager_ones(census, m):
    """A chain of layers, each reading what the last wrote: kernels overlap in the graph, and must not race."""
    dim, ffn, layers = 1024, 3072, 6
    norm = torch.ones(dim, device=DEVICE).bfloat16()
    gate_up = [torch.randn(2 * ffn, dim, device=DEVICE).bfloat16() * 0.05 for _ in range(layers)]
    down = [torch.randn(dim, ffn, device=DEVICE).bfloat16() * 0.05 for _ in range(layers)]
    x, stream = wide(m, dim), torch.cuda.Stream()

    def step() -> Tensor:
        y = x.clone()
        for up, low in zip(gate_up, down, strict=True):
            y = ops.linear_add(ops.norm_gate_up(y, norm, up, 1e-6), low, y)
        return y

    with torch.no_grad():
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = step()
    for _ in range(20):
        x.copy_(wide(m, dim))
        graph.replay()
        with torch.enable_grad():
            expected = step()
        assert census("layers: replayed fused = eager separate", captured, expected) == 0


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim", "norms"), [(16, 8, 128, True), (64, 8, 64, False)])
def test_grouped_decode_is_its_parts(census, heads, kv_heads, head_dim, norms):
    """Groups of eight after prompts of 300 tokens, the last groups with places left: beside rows that read alone."""
    count, page, pages, shared = 21, 16, 40, 288
    context = torch.randint(301, 640, (count,), device=DEVICE).int()
    table = torch.randperm(count * pages, device=DEVICE).int().view(count, pages)
    groups = torch.full((4, 8), -1, dtype=torch.int32, device=DEVICE)
    shared_len = torch.zeros(count, dtype=torch.int32, device=DEVICE)
    for group, members in enumerate((range(8), range(8, 16), range(16, 19))):
        rows = torch.tensor(members, device=DEVICE)
        groups[group, : len(members)] = rows.int()
        table[rows, : shared // page] = table[rows[0], : shared // page].clone()
        shared_len[rows] = shared
    position = context.long() - 1
    slots = table.gather(1, (position // page).unsqueeze(1)).squeeze(1) * page + position % page
    weights = (wide(head_dim), wide(head_dim)) if norms else (None, None)
    angles = torch.randn(count, head_dim, device=DEVICE)
    rotation = ops.Rotation(*weights, angles, heads, kv_heads, 1e-6)
    caches = torch.randn(2, count * pages, page, kv_heads, head_dim, device=DEVICE).bfloat16()
    expected, starts = caches.clone(), torch.arange(count + 1, device=DEVICE).int()
    for _ in range(3):
        qkv = wide(count, (heads + 2 * kv_heads) * head_dim)
        with torch.no_grad():
            contexts, by = ops.Contexts(table, context, pages * page), ops.PrefixGroups(groups, shared_len)
            out = ops.attention_decode(qkv, rotation, ops.KVPages(*caches), slots, contexts, by)
            q = ops.qk_norm_rope_write_kv(qkv, rotation, ops.KVPages(*expected), slots)
            alone = ops.attention_paged(q, ops.KVPages(*expected), ops.Paged(table, starts, context, 1, pages * page))
        assert census("attention_decode, grouped = its parts, alone", out, alone) == 0
        assert census("attention_decode, grouped: cache", caches, expected) == 0
