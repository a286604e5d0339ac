"""Attention with windows and masks on a CPU: bitwise the same in every layout, and right."""

from __future__ import annotations

import pytest
import torch
from c_library import using
from flex_cases import LAYOUTS, MASKS, Case, Mask, dense, invariant, same_bits

from lockstep import ops
from lockstep.ops.attention import reference as attention_reference

DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", MASKS)
def test_no_layout_changes_a_bit(name: str, dtype: torch.dtype) -> None:
    assert invariant(Case(200, 4, 2, 16, dtype), MASKS[name])


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(1, 1, 32), (6, 1, 24), (3, 3, 80)])
def test_no_layout_changes_a_bit_for_any_heads(heads: int, kv_heads: int, head_dim: int) -> None:
    assert invariant(Case(130, heads, kv_heads, head_dim), MASKS["dilated in a window"])


def test_contexts_of_several_splits_of_native_attention() -> None:
    case = Case(attention_reference.KEY_SPLIT + 70, 1, 1, 16)
    mask, rows = Mask(4000, "dilated"), [4031, 4095, 4096, 4097, case.length - 1]
    whole = case.packed(mask)
    assert same_bits(case.decoded(mask, 64, rows), whole[rows])
    assert same_bits(case.prefilled(mask, 64, [4090]), whole)
    torch.testing.assert_close(whole.double(), case.exact(mask), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", MASKS)
def test_it_is_dense_attention_with_the_mask(name: str) -> None:
    case = Case(150, 4, 2, 16)
    out, exact = case.packed(MASKS[name]), case.exact(MASKS[name])
    assert exact.abs().max() > 1
    torch.testing.assert_close(out.double(), exact, atol=1e-5, rtol=1e-4)


def test_without_a_mask_it_is_native_attention() -> None:
    case = Case(150, 4, 2, 16)
    layout = (case.int32(0, 150), case.int32(0), case.int32(0), 150)
    with using(None):
        assert same_bits(case.packed(Mask()), ops.attention_packed(case.q, case.k, case.v, ops.Packed(*layout)))


def test_a_row_without_a_key_is_zero() -> None:
    out = Case(40, 2, 1, 16).packed(MASKS["rows without keys"])
    assert not out[1::2].any() and out[::2].all()


@pytest.mark.parametrize("tile", [16, 32, 128])
def test_other_key_tiles_are_caught(tile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: a decode that takes other tiles than the packed layout."""
    case, mask, rows = Case(200, 4, 2, 16), MASKS["window of 100"], [70, 130, 199]
    whole = case.packed(mask)
    monkeypatch.setattr(attention_reference, "KEY_TILE", tile)
    assert not same_bits(case.decoded(mask, 16, rows), whole[rows])


@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_torchs_own_flex_attention_is_caught() -> None:
    """Why a CPU does not call it: a row decoded is not the row in its sequence."""
    attention = pytest.importorskip("torch.nn.attention.flex_attention")
    case, row, mask = Case(200, 4, 2, 16), 190, MASKS["dilated in a window"]
    visible = ops.visibility(*mask)

    def flex(first: int) -> torch.Tensor:
        q, k, v = (
            x.transpose(0, 1).unsqueeze(0) for x in (case.q[first : row + 1], case.k[: row + 1], case.v[: row + 1])
        )
        block_mask = attention.create_block_mask(
            lambda b, h, i, j: visible(i + first, j), None, None, q.shape[2], k.shape[2], device="cpu"
        )
        return attention.flex_attention(q, k, v, block_mask=block_mask, enable_gqa=True)[0, :, -1]

    whole, alone = flex(0), flex(row)
    torch.testing.assert_close(whole, case.packed(mask)[row])
    torch.testing.assert_close(whole, alone)
    assert not same_bits(whole, alone)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", MASKS)
def test_gradients_are_those_of_dense_attention(layout: str, name: str) -> None:
    padding, segments = LAYOUTS[layout]
    mask, rows = MASKS[name], sum(own for own, _, _ in segments)
    leaves = [torch.randn(rows + padding, heads, 16) for heads in (4, 2, 2)]
    grad = torch.randn(rows + padding, 4, 16)
    for x in (*leaves, grad):
        x[rows:] = torch.nan
        x.requires_grad_()
    own, start, length = (torch.tensor(column, dtype=torch.int32) for column in zip(*segments, strict=True))
    cu_seqlens = torch.nn.functional.pad(own.cumsum(0).int(), (1, 0))
    longest = int((own + length).max())
    by, by_mask = ops.Packed(cu_seqlens, start, length, longest), ops.FlexMask(*mask, [start])
    out, repeated = (ops.flex_packed(*leaves, by, by_mask) for _ in range(2))
    found, again = torch.autograd.grad(out, leaves, grad), torch.autograd.grad(repeated, leaves, grad)

    exact_leaves, total = [x.double().detach().requires_grad_() for x in leaves], 0.0
    for (count, first, prefix), begin in zip(segments, cu_seqlens.tolist(), strict=False):
        at = torch.cat((torch.arange(first, first + prefix), torch.arange(begin, begin + count)))
        attended = dense(exact_leaves[0][begin : begin + count], *(x[at] for x in exact_leaves[1:]), mask, prefix)
        total = total + (attended * grad[begin : begin + count].double()).sum()
    exact = torch.autograd.grad(total, exact_leaves)
    for x, y, repeated in zip(found, exact, again, strict=True):
        assert not x[rows:].any() and same_bits(x, repeated)
        torch.testing.assert_close(x[:rows].double(), y[:rows], atol=1e-5, rtol=1e-4)
