"""Latent attention and the product a head on a CPU: meaning, the same bits in every layout, gradients."""

from __future__ import annotations

import pytest
import torch
from latent_cases import Case, exact, exact_gradients, same_bits
from torch import Tensor

from lockstep import ops

DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def packed(case: Case) -> Tensor:
    return ops.mla_packed(case.latents, case.layout)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_layout_has_the_same_bits(dtype: torch.dtype) -> None:
    case = Case([150], heads=3, rank=20, dtype=dtype)
    whole = packed(case)
    few_ulps = {"rtol": 1e-5, "atol": 1e-5} if dtype is torch.float32 else {}
    torch.testing.assert_close(whole, exact(case), **few_ulps)
    for cuts in ([150], [1, 64, 150], [63, 65, 100, 150]):
        assert same_bits(case.prefilled(ops.mla_paged, cuts), whole)
    rows = [0, 5, 63, 64, 65, 127, 128, 149]
    assert same_bits(case.decoded(ops.mla_paged, rows), whole[rows])
    assert not same_bits(packed(Case.like(case, list(range(1, 150)))), whole[1:]), "CONTROL: a key less"


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_shared_prefix_is_a_repeated_prefix(dtype: torch.dtype) -> None:
    case = Case([70, 30, 0, 40], heads=3, prefixes=[0, 70, 0, 70], padding=5, dtype=dtype)
    out = packed(case)
    assert not out[140:].any(), "padding rows are zero"
    for begin, end in ((70, 100), (100, 140)):
        repeated = Case.like(case, [*range(70), *range(begin, end)])
        assert same_bits(packed(repeated)[70:], out[begin:end])


def test_gradients_are_those_of_the_definition() -> None:
    case = Case([70, 30, 0, 40], heads=3, prefixes=[0, 70, 0, 70], padding=5)
    grad = torch.randn_like(case.inputs[0])
    leaves = [x.clone().requires_grad_() for x in case.inputs]
    out = ops.mla_packed(ops.Latent(*leaves, case.scale), case.layout)
    for mine, wanted in zip(torch.autograd.grad(out, leaves, grad), exact_gradients(case, grad), strict=True):
        torch.testing.assert_close(mine, wanted.float(), rtol=1e-4, atol=1e-4)


def test_rows_are_written_where_attention_reads_them() -> None:
    case = Case([40], heads=2)
    filled, table = case.cache(40)
    cache, position = torch.full_like(filled, torch.nan), torch.arange(40)
    slots = table[0, position // 16].long() * 16 + position % 16
    ops.mla_write(*case.inputs[2:], cache, slots)
    assert same_bits(cache, filled)


@pytest.mark.parametrize("dtype", DTYPES)
def test_products_a_head_are_linear_and_independent_of_the_batch(dtype: torch.dtype) -> None:
    x = torch.randn(37, 5, 50).to(dtype)[:, :, 7:40]
    fused = torch.randn(5 * 60, 33).to(dtype)
    weight = fused.unflatten(0, (5, 60))[:, 20:44]
    out = ops.per_head_linear(x, weight)
    for n in range(5):
        assert same_bits(out[:, n], ops.linear(x[:, n].contiguous(), weight[n].contiguous()))
    for rows in ([3], [36, 0], list(range(30))):
        assert same_bits(ops.per_head_linear(x[rows], weight), out[rows])


def test_gradients_of_products_a_head() -> None:
    x, weight, grad = torch.randn(9, 4, 6), torch.randn(4, 5, 6), torch.randn(9, 4, 5)
    leaves = [x.requires_grad_(), weight.transpose(1, 2).contiguous().requires_grad_()]
    found = torch.autograd.grad(ops.per_head_linear(leaves[0], leaves[1].transpose(1, 2)), leaves, grad)
    expected = torch.autograd.grad(torch.einsum("tnk,nkm->tnm", *leaves), leaves, grad)
    for mine, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, wanted)
