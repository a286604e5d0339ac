"""Latent attention and the product a head on a GPU, at DeepSeek-V3's shapes: bits in every layout, gradients, time
beside the floor (`-s` shows the table).
"""

import pytest
import torch
from attention_cases import DEVICE, PEAK_TFLOPS, READ_GBPS, captured_milliseconds
from latent_cases import Case, exact, exact_gradients
from torch import Tensor
from values import relative_error

from lockstep import ops
from lockstep.ops.attention.operator import KEY_SPLIT
from lockstep.ops.mla import operator as operators

HEADS, RANK, ROPE_DIM, NOPE_DIM = 128, 512, 64, 128
EDGES = [0, 1, 63, 64, 65, 1000, 4094, 4095, 4096, 4097, 8191, 8192, 8193, 8999]

chain_of = pytest.importorskip("lockstep.ops.linear.triton", exc_type=ImportError).chain


def make(lengths: list[int], heads: int = HEADS, **more) -> Case:
    return Case(lengths, heads, RANK, ROPE_DIM, dtype=torch.bfloat16, device=DEVICE, **more)


def packed(case: Case) -> Tensor:
    return ops.mla_packed(case.latents, case.layout)


@pytest.mark.parametrize("heads", [HEADS, 16, 3])
def test_decode_is_chunked_prefill_is_packed(census, heads):
    case = make([257], heads)
    whole = packed(case)
    assert relative_error(whole, exact(case)) < 1e-2
    for cuts in ([257], [1, 2, 257], [63, 64, 65, 257], [100, 256, 257]):
        chunks = case.prefilled(ops.mla_paged, cuts)
        assert census("latent attention: chunked prefill = packed", chunks, whole) == 0
    for rows in ([256], list(range(0, 257, 3)), list(range(257))):
        decoded = case.decoded(ops.mla_paged, rows)
        assert census("latent attention: decode = packed", decoded, whole[rows]) == 0


def test_packed_is_invariant_to_neighbours_and_prefixes_are_shared(census):
    lengths, prefixes = [145, 100, 63, 0, 64, 1, 257], [0, 145, 145, 0, 145, 0, 0]
    case = make(lengths, prefixes=prefixes, padding=19)
    out, start = packed(case), 0
    assert not out[sum(lengths) :].any(), "padding rows are zero"
    for length, prefix in zip(lengths, prefixes, strict=True):
        if length:
            own = list(range(start, start + length))
            alone = packed(Case.like(case, [*range(prefix), *own]))[prefix:]
            assert census("latent attention: alone, prefix repeated = packed, shared", alone, out[own]) == 0
        start += length


def test_splits_are_the_same_in_every_layout(census):
    case = make([9000], heads=16)
    whole = packed(case)
    prefilled = case.prefilled(ops.mla_paged, [100, 4095, 4200, 9000])
    assert census("latent attention: long chunked prefill = packed", prefilled, whole) == 0
    decoded = case.decoded(ops.mla_paged, EDGES)
    assert census("latent attention: long decode = packed", decoded, whole[EDGES]) == 0
    one_split = packed(Case.like(case, list(range(KEY_SPLIT))))
    assert census("latent attention: one split of several = alone", one_split, whole[:KEY_SPLIT]) == 0


def test_tiles_warps_and_stages_change_no_bit(census, monkeypatch):
    from lockstep.ops.attention import triton as attention_triton
    from lockstep.ops.mla import triton as mla_triton

    case = make([300], heads=32)
    whole = packed(case)
    for tile in ((16, 4, 2), (32, 8, 1), (32, 8, 2), (64, 8, 1), (64, 4, 1)):
        monkeypatch.setattr(mla_triton, "TILE", mla_triton.AttentionTile(*tile))
        assert census("latent attention: other tiles", packed(case), whole) == 0
    monkeypatch.setattr(attention_triton, "KEY_SPLIT", 128)
    assert census("CONTROL latent attention: splits of 128", packed(case)[128:], whole[128:]) > 0


@pytest.mark.parametrize("heads", [HEADS, 3])
def test_gradients(census, heads):
    lengths, prefixes = [145, 100, 63, 0, 64, 200], [0, 145, 145, 0, 145, 0]
    case = make(lengths, heads, prefixes=prefixes, padding=19)
    leaves = [x.detach().clone().requires_grad_() for x in case.inputs]
    grad = torch.randn_like(case.inputs[0])

    def gradients() -> tuple[Tensor, ...]:
        return torch.autograd.grad(ops.mla_packed(ops.Latent(*leaves, case.scale), case.layout), leaves, grad)

    found = gradients()
    for mine, again in zip(found, gradients(), strict=True):
        assert census("latent attention: gradients again", mine, again) == 0
    for mine, wanted in zip(found, exact_gradients(case, grad), strict=True):
        assert not mine[sum(lengths) :].any(), "padding rows are zero"
        assert relative_error(mine, wanted) < 2e-2


@pytest.mark.parametrize(("width", "columns"), [(NOPE_DIM, RANK), (RANK, NOPE_DIM), (40, 24)])
def test_products_a_head_are_the_chain_in_any_batch(census, width, columns):
    heads = HEADS if width > 40 else 5
    fused = torch.randn(1025, heads, width + 64, device=DEVICE)
    x = (fused * torch.exp(2 * torch.randn_like(fused))).bfloat16()[:, :, :width]
    weight = torch.randn(heads, width, columns, device=DEVICE).bfloat16().transpose(1, 2)
    out = ops.per_head_linear(x, weight)
    for n in range(0, heads, 17):
        chain = chain_of(x[:, n].contiguous(), weight[n].contiguous())
        assert census("product a head = one-accumulator chain", out[:, n], chain) == 0
    for rows in (1, 2, 7, 16, 17, 63, 64, 65, 129, 512):
        assert census("product a head: batches", ops.per_head_linear(x[-rows:], weight), out[-rows:]) == 0


def test_gradients_of_products_a_head():
    x = torch.randn(300, 16, NOPE_DIM, device=DEVICE).bfloat16().requires_grad_()
    weight = torch.randn(16, RANK, NOPE_DIM, device=DEVICE).bfloat16().requires_grad_()
    grad = torch.randn(300, 16, RANK, device=DEVICE).bfloat16()
    found = torch.autograd.grad(ops.per_head_linear(x, weight), (x, weight), grad)
    leaves = [t.detach().double().requires_grad_() for t in (x, weight)]
    wanted = torch.autograd.grad(torch.einsum("tnk,nmk->tnm", *leaves), leaves, grad.double())
    assert all(relative_error(a, b) < 1e-2 for a, b in zip(found, wanted, strict=True))


# Time


def shown(what: str, ms: float, flops: float, read: float) -> float:
    """Prints a time and how often it holds the floor."""
    floor = max(flops / PEAK_TFLOPS / 1e9, read / READ_GBPS / 1e6)
    print(f"\n{what}: {ms:.4f} ms, {flops / ms / 1e9:.0f} TFLOP/s, floor {floor:.4f} ({ms / floor:.1f}x)")
    return ms / floor


TILES = [(64, 8, 2), (64, 8, 1), (32, 8, 2)]


@pytest.mark.timed
@pytest.mark.parametrize("tile", TILES)
def test_time_of_decode(monkeypatch, tile):
    from lockstep.ops.mla import triton as mla_triton

    monkeypatch.setattr(mla_triton, "TILE", mla_triton.AttentionTile(*tile))
    sequences, context, page = 64, 1024, 16
    q = torch.randn(sequences, HEADS, RANK, device=DEVICE).bfloat16()
    q_rope = torch.randn(sequences, HEADS, ROPE_DIM, device=DEVICE).bfloat16()
    cache = torch.randn(sequences * context // page, page, RANK + ROPE_DIM, device=DEVICE).bfloat16()
    table = torch.randperm(len(cache), device=DEVICE).int().view(sequences, -1)
    starts = torch.arange(sequences + 1, device=DEVICE).int()
    contexts = torch.full((sequences,), context, dtype=torch.int32, device=DEVICE)
    by = ops.Paged(table, starts, contexts, 1, context)
    ms = captured_milliseconds(lambda: ops.mla_paged(q, q_rope, cache, 0.1, by))
    flops = 2 * sequences * context * HEADS * (2 * RANK + ROPE_DIM)
    assert shown(f"decode {sequences} x {context}, tile {tile}", ms, flops, cache.numel() * 2) < 12


@pytest.mark.timed
@pytest.mark.parametrize("tile", TILES)
def test_time_of_packed(monkeypatch, tile):
    from lockstep.ops.mla import triton as mla_triton

    monkeypatch.setattr(mla_triton, "TILE", mla_triton.AttentionTile(*tile))
    case = make([1024] * 4)
    flops = 2 * 4 * 1024 * 1025 / 2 * HEADS * (2 * RANK + ROPE_DIM)
    assert shown(f"4 x 1024 tokens, tile {tile}", captured_milliseconds(lambda: packed(case), 3), flops, 0) < 8


@pytest.mark.timed
def test_time_of_the_backward():
    case = make([1024] * 4)
    out, lse = operators._packed(case.latents, case.layout)
    grad, arguments = torch.randn_like(out), (case.latents, case.layout, out, lse)
    ms = captured_milliseconds(lambda: operators.mla_packed_backward(grad, *arguments), 3)
    flops = 2 * 4 * 1024 * 1025 / 2 * HEADS * (7 * RANK + 4 * ROPE_DIM)  # with the scores done twice
    assert shown("backward, 4 x 1024 tokens", ms, flops, 0) < 30


@pytest.mark.timed
@pytest.mark.parametrize("rows", [64, 1024, 4096])
def test_time_of_products_a_head(rows):
    x = torch.randn(rows, HEADS, NOPE_DIM, device=DEVICE).bfloat16()
    weight = torch.randn(HEADS, RANK, NOPE_DIM, device=DEVICE).bfloat16()
    ms = captured_milliseconds(lambda: ops.per_head_linear(x, weight))
    touched = 2 * (x.numel() + weight.numel() + rows * HEADS * RANK)
    assert shown(f"product a head, {rows} rows", ms, 2 * rows * HEADS * NOPE_DIM * RANK, touched) < 12
