"""Latent attention's kernels and the product a head under Triton's interpreter, in float32: bits in every layout
against each other, values and gradients against float64.

As in `test_kernels_interpret`, one test runs `Interpreted` in a process of its own. Splits are 128 keys there.
"""

import os

import numpy as np
import pytest
import torch
from latent_cases import Case, exact, exact_gradients, same_bits
from processes import run_interpreted
from torch import Tensor

from lockstep import ops

if os.environ.get("TRITON_INTERPRET") == "1":
    from lockstep.ops.attention import triton as attention_triton
    from lockstep.ops.linear import triton as linear_triton
    from lockstep.ops.mla import triton as mla_triton
    from lockstep.ops.rope import triton as rope_triton

SPLIT = 128


def test_kernels_under_the_interpreter():
    run_interpreted(__file__)


def packed(case: Case) -> Tensor:
    return mla_triton.packed(case.latents, case.layout)[0]


class Interpreted:
    @pytest.fixture(autouse=True)
    def exact_products(self, monkeypatch):
        """Short splits, and products that do not depend on a row's place in its block: rounded from float64."""

        def matmul(a, b, dtype):
            return (a.astype(np.float64) @ b.astype(np.float64)).astype(dtype)

        torch.manual_seed(0)
        torch.use_deterministic_algorithms(True)  # fills new memory with NaN
        monkeypatch.setattr(np, "matmul", matmul)
        monkeypatch.setattr(attention_triton, "KEY_SPLIT", SPLIT)
        yield
        torch.use_deterministic_algorithms(False)

    @pytest.mark.parametrize("rank", [32, 20])
    def test_every_layout_has_the_same_bits(self, rank):
        case = Case([200], heads=3, rank=rank)
        whole = packed(case)
        torch.testing.assert_close(whole, exact(case), rtol=1e-4, atol=1e-5)
        for cuts in ([200], [1, 64, 200], [127, 129, 200]):
            assert same_bits(case.prefilled(mla_triton.paged, cuts), whole)
        rows = [0, 63, 64, 127, 128, 129, 199]
        assert same_bits(case.decoded(mla_triton.paged, rows), whole[rows])

    def test_a_shared_prefix_is_a_repeated_prefix(self):
        case = Case([70, 30, 0, 40], heads=3, prefixes=[0, 70, 0, 70], padding=5)
        out = packed(case)
        assert not out[140:].any(), "padding rows are zero"
        for begin, end in ((70, 100), (100, 140)):
            repeated = Case.like(case, [*range(70), *range(begin, end)])
            assert same_bits(packed(repeated)[70:], out[begin:end])

    def test_other_tiles_change_no_bit(self, monkeypatch):
        case = Case([150], heads=3)
        whole = packed(case)
        monkeypatch.setattr(mla_triton, "TILE", mla_triton.AttentionTile(16, 4, 1))
        assert same_bits(packed(case), whole)
        monkeypatch.setattr(attention_triton, "KEY_SPLIT", 1 << 20)
        assert same_bits(packed(case)[:SPLIT], whole[:SPLIT]), "one split needs no merging"
        assert not same_bits(packed(case)[SPLIT:], whole[SPLIT:]), "CONTROL: other splits are another sum"

    @pytest.mark.parametrize("heads", [3, 32])
    def test_gradients(self, heads):
        lengths = [70, 30, 0, 20] if heads == 3 else [20, 9]
        prefixes = [0, 70, 0, 70] if heads == 3 else [0, 20]
        case = Case(lengths, heads=heads, prefixes=prefixes, padding=5)
        out, lse = mla_triton.packed(case.latents, case.layout)
        grad = torch.randn_like(out)
        found = mla_triton.packed_backward(grad, case.latents, case.layout, out, lse)
        for mine, wanted in zip(found, exact_gradients(case, grad), strict=True):
            torch.testing.assert_close(mine, wanted.float(), rtol=1e-4, atol=1e-4)

    @pytest.mark.parametrize("rows", [1, 70])
    def test_products_a_head(self, rows):
        x, weight = torch.randn(rows, 3, 50)[:, :, 7:40], torch.randn(3, 33, 24).transpose(1, 2)
        expected = torch.einsum("tnk,nmk->tnm", x, weight)
        torch.testing.assert_close(linear_triton.per_head_linear(x, weight), expected, rtol=1e-5, atol=1e-5)
        alone = linear_triton.per_head_linear(x[:1], weight)
        assert same_bits(alone, linear_triton.per_head_linear(x, weight)[:1])

    def test_heads_without_values_are_rotated_both_ways(self):
        x, table = torch.randn(9, 5 * 6), ops.rope_table(torch.arange(9) * 7, torch.rand(3))
        leaf = x.clone().requires_grad_()
        by = ops.Rotation(None, None, table, 4, 1, 0.0)
        expected = ops.qk_norm_rope(leaf, by)
        torch.testing.assert_close(rope_triton.qk_norm_rope(x, by), expected.detach())
        grad = torch.randn_like(expected)
        found = rope_triton.qk_norm_rope_backward(grad, x, by)[0]
        torch.testing.assert_close(found, torch.autograd.grad(expected, leaf, grad)[0])
