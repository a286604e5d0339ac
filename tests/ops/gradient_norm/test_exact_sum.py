"""The sum that gradients are clipped by: exact, rounded once, and without an order."""

from __future__ import annotations

import math

import pytest
import torch
from exact_sums import exact, numbers, odd_words, of_words, rounded_root

from lockstep import ops

KINDS = ("near", "wide", "bits", "subnormal")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [1, 7, 5000])
def test_a_sum_is_exact_and_its_root_is_rounded_once(kind: str, count: int) -> None:
    x = numbers(count, kind, seed=count)
    words = ops.exact_sum(x)
    assert of_words(words) == exact(x) and not words[9:].any()
    assert ops.root_of_sum(words).item() == rounded_root(exact(x))


@pytest.mark.parametrize("kind", KINDS)
def test_neither_order_nor_who_adds_what_changes_a_word(kind: str) -> None:
    x = numbers(5000, kind, seed=1)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(2))
    assert torch.equal(ops.exact_sum(x[order]), ops.exact_sum(x))
    parts = torch.stack([ops.exact_sum(part) for part in x[order].split(1700)]).sum(0)
    assert ops.root_of_sum(parts) == ops.root_of_sum(ops.exact_sum(x))
    if kind == "near":  # the control: additions of float32 have an order
        orders = [torch.randperm(len(x), generator=torch.Generator().manual_seed(seed)) for seed in range(20)]
        assert len({x[order].sum().item() for order in orders}) > 1


def test_words_that_carry_are_rounded_as_their_sum() -> None:
    for words in odd_words():
        assert ops.root_of_sum(words).item() == rounded_root(of_words(words))


def test_what_is_not_finite_is_not_lost_and_a_large_sum_is_no_such() -> None:
    x = numbers(3000, "wide", seed=3)
    x[5] = math.inf
    assert ops.root_of_sum(ops.exact_sum(x)).item() == math.inf
    x[2000] = -math.nan
    assert math.isnan(ops.root_of_sum(ops.exact_sum(x)).item())
    largest = torch.full((1 << 12,), torch.finfo(torch.float32).max)
    assert ops.root_of_sum(ops.exact_sum(largest)).item() == rounded_root(exact(largest)) < math.inf
