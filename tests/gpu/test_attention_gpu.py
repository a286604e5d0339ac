"""Attention's bits on a GPU, the same for every layout, tile, split and group, and its time beside FlashAttention-2 and
cuDNN (`-s` shows the tables).
"""

import pytest
import torch
import torch.nn.functional as F
from attention_cases import (
    DEVICE,
    HEAD_DIM,
    HEADS,
    KV_HEADS,
    PEAK_TFLOPS,
    READ_GBPS,
    cache_of,
    captured_milliseconds,
    decoded,
    int32,
    packed,
    paged_chunks,
    qkv_rows,
)
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from values import relative_error

from lockstep import ops
from lockstep.ops.attention import triton_decode
from lockstep.ops.attention.operator import KEY_SPLIT

EDGES = [0, 1, 62, 63, 64, 65, 127, 128, 200, 256, 1000, 2047, 4094, 4095, 4096, 4097, 4160, 8191, 8192, 8193, 8999]


def test_packed_attention_is_invariant_to_neighbours(census):
    lengths = [1, 63, 64, 65, 145, 200, 257, 700]
    q, k, v = qkv_rows(sum(lengths) + 19)
    whole = packed(q, k, v, lengths)
    assert not whole[sum(lengths) :].any(), "padding rows are zero"
    start = 0
    for length in lengths:
        own = slice(start, start + length)
        alone = packed(q[own], k[own], v[own], [length])
        assert census("attention: a segment alone = packed", alone, whole[own]) == 0
        exact = F.scaled_dot_product_attention(
            *(x[own].double().transpose(0, 1) for x in (q, k, v)), is_causal=True, enable_gqa=True
        )
        assert relative_error(alone, exact.transpose(0, 1)) < 1e-2
        start += length


@pytest.mark.parametrize("page_size", [16, 256])
def test_decode_is_chunked_prefill_is_packed(census, page_size):
    q, k, v = qkv_rows(257)
    whole = packed(q, k, v, [257])
    for length in (1, 63, 64, 65, 128, 257):
        x = q[:length], k[:length], v[:length]
        assert census("attention: prefill = packed", paged_chunks(*x, page_size, [length]), whole[:length]) == 0
    for cuts in ([1, 2, 257], [63, 64, 65, 257], [100, 256, 257]):
        assert census("attention: chunked prefill = packed", paged_chunks(q, k, v, page_size, cuts), whole) == 0
    assert census("attention: decode = packed", decoded(q, k, v, page_size, list(range(257))), whole) == 0


def test_shared_prefix_is_a_repeated_prefix(census):
    """A group: a prompt of 145 tokens once, then 8 completions of 100."""
    prompt, count, length = 145, 8, 100
    q, k, v = qkv_rows(prompt + count * length)
    cu_seqlens = int32(0, *range(prompt, len(q) + 1, length))
    start, prefix = int32(*[0] * (count + 1)), int32(0, *[prompt] * count)
    shared = ops.attention_packed(q, k, v, ops.Packed(cu_seqlens, start, prefix, prompt + length))
    for i in range(count):
        own = torch.arange(prompt + i * length, prompt + (i + 1) * length, device=DEVICE)
        index = torch.cat((torch.arange(prompt, device=DEVICE), own))
        repeated = packed(q[index], k[index], v[index], [prompt + length])
        assert census("attention: shared = repeated prefix", shared[own], repeated[prompt:]) == 0


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(16, 8, 128), (32, 8, 64)])
def test_splits_are_the_same_in_every_layout(census, heads, kv_heads, head_dim):
    q, k, v = qkv_rows(9000, heads, kv_heads, head_dim)
    whole = packed(q, k, v, [len(q)])
    exact = F.scaled_dot_product_attention(
        *(x.float().transpose(0, 1).unsqueeze(0) for x in (q, k, v)), is_causal=True, enable_gqa=True
    )
    assert relative_error(whole, exact[0].transpose(0, 1).double()) < 1e-2
    prefilled = paged_chunks(q, k, v, 16, [100, 4095, 4200, len(q)])
    assert census("attention: long chunked prefill = packed", prefilled, whole) == 0
    assert census("attention: long decode = packed", decoded(q, k, v, 16, EDGES), whole[EDGES]) == 0
    one_split = packed(*(x[:KEY_SPLIT] for x in (q, k, v)), [KEY_SPLIT])
    assert census("attention: one split of several = alone", one_split, whole[:KEY_SPLIT]) == 0


def test_other_splits_are_caught(census, monkeypatch):
    from lockstep.ops.attention import triton as attention_triton

    q, k, v = qkv_rows(257)
    whole = packed(q, k, v, [257])
    monkeypatch.setattr(attention_triton, "KEY_SPLIT", 128)
    split = packed(q, k, v, [257])
    assert census("CONTROL attention: splits of 128", split[128:], whole[128:]) > 0
    assert census("attention: the first of several splits", split[:128], whole[:128]) == 0


def test_tiles_warps_and_stages_change_no_bit(census, monkeypatch):
    from lockstep.ops.attention import triton as attention_triton

    length = 700
    q, k, v = qkv_rows(length)
    whole, rows = packed(q, k, v, [length]), list(range(0, length, 7))
    members = [i for i, row in enumerate(rows) if row >= 256]
    shared = torch.tensor([members], device=DEVICE).int(), int32(*[256 * (row >= 256) for row in rows])
    for tile in ((16, 1, 2), (32, 2, 3), (64, 4, 1), (128, 8, 2)):
        monkeypatch.setattr(
            attention_triton, "_choose_tile", lambda *_, tile=tile: attention_triton.AttentionTile(*tile)
        )
        assert census("attention: other tiles", packed(q, k, v, [length]), whole) == 0
        monkeypatch.setattr(triton_decode, "_choose_tile", lambda *_, tile=tile: attention_triton.AttentionTile(*tile))
        assert census("attention: other tiles, decode", decoded(q, k, v, 16, rows), whole[rows]) == 0
        monkeypatch.setattr(
            triton_decode, "_choose_group_tile", lambda *_, tile=tile: attention_triton.AttentionTile(*tile)
        )
        choose_group_kernel(monkeypatch, False)
        assert census("attention: other tiles, groups", decoded(q, k, v, 16, rows, *shared), whole[rows]) == 0


def choose_group_kernel(monkeypatch, by_warp: bool) -> None:
    """Choose the kernel of groups."""
    monkeypatch.setattr(triton_decode.hopper_decode, "pays_for_groups", lambda *_: by_warp)


@pytest.mark.parametrize("by_warp", [True, False])
@pytest.mark.parametrize("width", [8, 20])
@pytest.mark.parametrize("shared", [64, 145, 320, 1030, 4096, 4500, 8200])
def test_groups_change_no_bit(census, monkeypatch, shared, width, by_warp):
    choose_group_kernel(monkeypatch, by_warp)
    q, k, v = qkv_rows(9000)
    rows = [row for row in EDGES if row + 1 >= shared] + [0, 63]
    groups = torch.full((len(rows), width), -1, dtype=torch.int32)
    for i in range(len(rows) - 2):  # the last two stay alone
        groups[i // width, i % width] = i
    shared_len = [shared] * (len(rows) - 2) + [0, 0]
    out = decoded(q, k, v, 16, rows, groups.to(DEVICE), int32(*shared_len))
    assert census("attention: grouped = alone", out, decoded(q, k, v, 16, rows)) == 0


@pytest.mark.parametrize("shared", [64, 145, 4500])
def test_rows_beside_prompts_have_their_bits(census, shared):
    """Rows of one token, in groups and not, and at rest, in one batch with pieces of a prompt and padding."""
    length, cuts, single = 9000, [*range(700, 1341, 64), 1341], len(EDGES) + 2
    q, k, v = qkv_rows(length)
    rows = [*(max(row, shared) for row in EDGES), 0, 63]
    table = torch.randperm(-(-length // 16), device=DEVICE).int()
    cache = ops.KVPages(*(cache_of(x, table, 16) for x in (k, v)))
    tables = table.expand(single + len(cuts) - 1, -1).contiguous()
    starts = int32(*range(single), *(single + cut - cuts[0] for cut in cuts))
    context = int32(*(row + 1 for row in rows), *cuts[1:])
    groups = torch.full((4, 8), -1, dtype=torch.int32)
    groups.view(-1)[: len(rows) - 1] = torch.arange(len(rows) - 1).roll(1)  # the first is at rest
    shared_len = int32(*[shared] * (len(rows) - 1), 0)
    inputs = torch.cat((q[rows], q[cuts[0] : cuts[-1]], q[:7]))
    out, alone = (
        ops.attention_paged(inputs, cache, ops.Paged(tables, starts, context, 64, length), by)
        for by in (ops.PrefixGroups(groups.to(DEVICE), shared_len), ops.NO_GROUPS)
    )
    busy = [i for i, row in enumerate(rows) if row]
    assert census("attention: rows beside a prompt, grouped = alone", out[busy], alone[busy]) == 0
    assert census("attention: rows beside a prompt = decoded", out[busy], decoded(q, k, v, 16, rows)[busy]) == 0
    assert census("attention: the prompt beside grouped rows = alone", out[single:], alone[single:]) == 0


# Time


@pytest.mark.timed
@pytest.mark.parametrize(("count", "length"), [(40, 245), (16, 2048), (2, 16384)])
def test_forward_is_as_fast_as_flash_attention(count, length):
    q, k, v = qkv_rows(count * length)
    starts, zeros = int32(*range(0, len(q) + 1, length)), int32(*[0] * count)
    calls = 20 if length < 1000 else 3
    ours = captured_milliseconds(lambda: ops.attention_packed(q, k, v, ops.Packed(starts, zeros, zeros, length)), calls)
    dense = [x.reshape(count, length, -1, HEAD_DIM).transpose(1, 2).contiguous() for x in (q, k, v)]
    peers = []
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):
        with sdpa_kernel(backend):
            peers.append(
                captured_milliseconds(
                    lambda: F.scaled_dot_product_attention(*dense, is_causal=True, enable_gqa=True), calls
                )
            )
    flops = 2 * 2 * count * length * (length + 1) / 2 * HEADS * HEAD_DIM
    flash, cudnn = peers
    floor = flops / PEAK_TFLOPS / 1e9
    print(
        f"\n{count} x {length}: {ours:.4f} ms ({flops / ours / 1e9:.0f} TFLOP/s), floor {floor:.4f}, "
        f"FlashAttention {flash:.4f} ({ours / flash:.2f}x its time), cuDNN {cudnn:.4f}"
    )
    assert ours < flash


class Batch:
    """Sequences of one length in shuffled pages; with `shared` positions, eight at a time share the pages of those."""

    def __init__(self, sequences: int, context: int, shared: int = 0, page_size: int = 16) -> None:
        pages = -(-context // page_size)
        self.table = torch.randperm(sequences * pages).int().view(sequences, pages)
        if shared:
            by_group = self.table.view(-1, 8, pages)
            by_group[:, :, : shared // page_size] = by_group[:, :1, : shared // page_size].clone()
        self.table = self.table.to(DEVICE)
        self.caches = torch.randn(2, sequences * pages, page_size, KV_HEADS, HEAD_DIM, device=DEVICE).bfloat16()
        self.q = torch.randn(sequences, HEADS, HEAD_DIM, device=DEVICE).bfloat16()
        self.starts, self.context = torch.arange(sequences + 1, device=DEVICE).int(), int32(*[context] * sequences)
        rows = torch.arange(sequences, device=DEVICE).int()
        self.groups = rows.view(-1, min(8, sequences)), int32(*[shared] * sequences)
        self.max_context = context

    def milliseconds(self, *groups: Tensor) -> float:
        by = ops.Paged(self.table, self.starts, self.context, 1, self.max_context)
        cache, shared = ops.KVPages(*self.caches), ops.PrefixGroups(*groups)
        return captured_milliseconds(lambda: ops.attention_paged(self.q, cache, by, shared))


@pytest.mark.timed
def test_decode_reads_at_the_memory_s_speed():
    ms = Batch(256, 1024).milliseconds()
    gb = 256 * 1024 * KV_HEADS * HEAD_DIM * 4 / 1e9
    print(f"\n256 x 1024: {ms * 1e3:.1f} us, {gb / ms * 1e3:.0f} GB/s of {READ_GBPS}")
    assert gb / ms * 1e3 > 0.8 * READ_GBPS


@pytest.mark.timed
def test_a_shared_prompt_is_read_once():
    shared = Batch(256, 1088, shared=1024)
    grouped, same_pages, apart = (
        shared.milliseconds(*shared.groups),
        shared.milliseconds(),
        Batch(256, 1088).milliseconds(),
    )
    print(f"\n32 x 8 x (1024 + 64): {grouped * 1e3:.1f} us, {same_pages * 1e3:.1f} ungrouped, {apart * 1e3:.1f} apart")
    assert grouped < same_pages / 2 and grouped < apart / 3


@pytest.mark.timed
def test_splits_fill_the_card():
    """One sequence: 64 programs instead of 8."""
    one, long = Batch(8, 4096).milliseconds(), Batch(1, 32768)
    ms = long.milliseconds()
    print(f"\n1 x 32768: {ms * 1e3:.1f} us; 8 x 4096: {one * 1e3:.1f} us")
    assert ms < 1.5 * one
