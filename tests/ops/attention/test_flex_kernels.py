"""How FlexAttention is called on a GPU, on a CPU: the layouts and tile lists that its kernel gets, and what comes out.

The kernel itself needs a GPU (`tests/gpu/test_flex_gpu.py`). `tiled` stands for it: it reads the tiles of the lists and
nothing else, in their order, with the kernel's online softmax. So a wrong list, position or table shows, and so does a
value of another sequence.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from flex_cases import LAYOUTS, MASKS, Case, Mask, dense, invariant, same_bits
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from lockstep import ops
from lockstep.ops.attention import triton_flex


def tiled(q: Tensor, k: Tensor, v: Tensor, block_mask: BlockMask, kernel_options: dict[str, Any]) -> Tensor:
    """The kernel: `_inductor/kernel/flex/templates/flex_attention.py.jinja`, tiles of its lists one after another."""
    rows_of, tile_of = block_mask.BLOCK_SIZE
    assert block_mask.full_kv_num_blocks is None and (rows_of, tile_of) in (triton_flex.FORWARD, triton_flex.BACKWARD)
    assert block_mask.seq_lengths == (q.shape[2], k.shape[2]) and q.shape[2] % rows_of == 0 == k.shape[2] % tile_of
    count_B, list_BL = block_mask.kv_num_blocks[0, 0], block_mask.kv_indices[0, 0]
    zero, row, key = torch.tensor(0), torch.arange(q.shape[2]), torch.arange(k.shape[2])
    blocks = []
    for b in range(len(count_B)):
        rows = row[b * rows_of : (b + 1) * rows_of]
        maximum = torch.full((q.shape[1], rows_of, 1), -torch.inf)
        total, acc = torch.zeros(q.shape[1], rows_of, 1), torch.zeros(q.shape[1], rows_of, q.shape[3])
        for tile in list_BL[b, : count_B[b]].tolist():
            keys = key[tile * tile_of : (tile + 1) * tile_of]
            scores = torch.bmm(q[0, :, rows].float(), k[0, :, keys].float().transpose(1, 2)) * q.shape[3] ** -0.5
            seen = block_mask.mask_mod(zero, zero, rows.unsqueeze(1), keys.unsqueeze(0))
            scores = torch.where(seen, scores, -torch.inf)
            new = torch.maximum(maximum, scores.amax(2, keepdim=True))
            shift = torch.where(new == -torch.inf, 0.0, new)
            alpha, p = torch.exp(maximum - shift), torch.exp(scores - shift)
            total = total * alpha + p.sum(2, keepdim=True)
            acc, maximum = acc * alpha + torch.bmm(p.to(v.dtype).float(), v[0, :, keys].float()), new
        blocks.append(acc / torch.where(total == 0, 1.0, total))
    if block_mask.q_indices is not None:
        _check_transposed(block_mask)
    return torch.cat(blocks, dim=1).unsqueeze(0).to(q.dtype)


def _check_transposed(block_mask: BlockMask) -> None:
    """The backward's lists, of blocks by tile, say what the forward's do."""

    def pairs(count: Tensor, listed: Tensor) -> set[tuple[int, int]]:
        return {(i, int(j)) for i, n in enumerate(count[0, 0]) for j in listed[0, 0, i, :n]}

    assert block_mask.q_num_blocks is not None and block_mask.q_indices is not None
    forward = pairs(block_mask.kv_num_blocks, block_mask.kv_indices)
    assert {(j, i) for i, j in pairs(block_mask.q_num_blocks, block_mask.q_indices)} == forward


@pytest.fixture(autouse=True)
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(triton_flex, "_compiled_attend", triton_flex._make_attend)
    monkeypatch.setattr(triton_flex, "flex_attention", tiled)


def case_of(*sizes: int, dtype: torch.dtype = torch.float32) -> Case:
    return Case(*sizes, dtype=dtype, module=triton_flex)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", MASKS)
def test_no_layout_changes_a_bit(name: str, dtype: torch.dtype) -> None:
    assert invariant(case_of(200, 4, 2, 16, dtype=dtype), MASKS[name], page_sizes=(64, 128), rest=0.0)


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (6, 1), (10, 2), (64, 1)])
def test_any_group_of_heads_fits_a_block(heads: int, kv_heads: int) -> None:
    case, mask = case_of(130, heads, kv_heads, 16), MASKS["dilated in a window"]
    torch.testing.assert_close(case.packed(mask).double(), case.exact(mask), atol=1e-5, rtol=1e-4)
    assert invariant(case, mask, page_sizes=(64, 192), rest=0.0)


@pytest.mark.parametrize("name", MASKS)
def test_it_is_dense_attention_with_the_mask(name: str) -> None:
    case = case_of(200, 4, 2, 16)
    torch.testing.assert_close(case.packed(MASKS[name]).double(), case.exact(MASKS[name]), atol=1e-5, rtol=1e-4)


def test_a_window_reads_no_tile_before_it() -> None:
    by, sizes = ops.Packed(torch.tensor([0, 640]), torch.tensor([0]), torch.tensor([0]), 640), ops.FlexSizes(640, 4, 2)
    counts = {w: triton_flex._tiles_packed(by, sizes, w, triton_flex.FORWARD) for w in (0, 1, 64, 100)}
    assert counts[0].count_B.tolist()[:20] == [1 + i // 2 for i in range(20)]
    assert max(counts[1].count_B) == 1 and max(counts[64].count_B) == 2 and max(counts[100].count_B) == 3
    assert [counts[w].list_BL.shape[1] for w in (0, 1, 64, 100)] == [10, 2, 3, 4]


@pytest.mark.parametrize("name", ["causal", "dilated in a window"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_are_those_of_dense_attention(layout: str, name: str) -> None:
    padding, segments = LAYOUTS[layout]
    mask, rows = MASKS[name], sum(own for own, _, _ in segments)
    q, k, v, grad = (torch.randn(rows + padding, heads, 16) for heads in (4, 2, 2, 4))
    for x in (q, k, v, grad):
        x[rows:] = torch.nan
    own, start, length = (torch.tensor(column, dtype=torch.int32) for column in zip(*segments, strict=True))
    cu_seqlens = torch.nn.functional.pad(own.cumsum(0).int(), (1, 0))
    by = ops.Packed(cu_seqlens, start, length, int((own + length).max()))
    tiles = triton_flex.tiles_packed(by, ops.FlexSizes(rows + padding, 4, 2), mask.window)
    found = triton_flex.packed_backward(grad, q, k, v, by, ops.FlexMask(*mask, tiles))
    leaves, total = [x.double().requires_grad_() for x in (q, k, v)], torch.zeros(())
    for (count, first, prefix), begin in zip(segments, cu_seqlens.tolist(), strict=False):
        at = torch.cat((torch.arange(first, first + prefix), torch.arange(begin, begin + count)))
        attended = dense(leaves[0][begin : begin + count], *(x[at] for x in leaves[1:]), mask, prefix)
        total = total + (attended * grad[begin : begin + count].double()).sum()
    for x, y in zip(found, torch.autograd.grad(total, leaves), strict=True):
        assert not x[rows:].any()
        torch.testing.assert_close(x[:rows].double(), y[:rows], atol=1e-5, rtol=1e-4)


def test_tiles_taken_in_another_order_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: partial tiles first, then full ones, as the kernel would were they told apart."""
    case, mask = case_of(200, 4, 2, 16), Mask()
    whole, order = case.packed(mask), triton_flex._tiles_packed

    def reversed_lists(*arguments: Any) -> triton_flex.Tiles:
        tiles = order(*arguments)
        index = (tiles.count_B.unsqueeze(1) - 1 - torch.arange(tiles.list_BL.shape[1])).clamp(min=0)
        return tiles._replace(list_BL=tiles.list_BL.gather(1, index.long()))

    monkeypatch.setattr(triton_flex, "_tiles_packed", reversed_lists)
    again = case.packed(mask)
    torch.testing.assert_close(again, whole)
    assert not same_bits(again, whole)


def test_pages_that_are_no_whole_tiles_are_refused() -> None:
    with pytest.raises(ValueError, match="pages have 16 positions; flex attention reads multiples of 64"):
        case_of(40, 2, 1, 16).decoded(Mask(), 16, [5])
