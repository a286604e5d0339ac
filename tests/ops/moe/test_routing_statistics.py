"""The digest of a token's experts, their loads, and the summed probabilities with their gradient."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.autograd import gradcheck

from lockstep import ops
from lockstep.ops.moe import routing

CHOICES, EXPERTS = 60, 64


@pytest.fixture
def experts() -> torch.Tensor:
    return torch.randint(0, EXPERTS, (9, CHOICES), generator=torch.Generator().manual_seed(0))


def test_the_digest_is_the_polynomial_it_is_said_to_be(experts: torch.Tensor) -> None:
    base = routing._DIGEST_BASE
    expected = [sum(e * base ** (n + 1) for n, e in enumerate(row)) % 2**31 for row in experts.tolist()]
    assert ops.route_digest(experts).tolist() == expected and len(set(expected)) == len(experts)


def test_any_one_other_expert_is_another_digest(experts: torch.Tensor) -> None:
    before = ops.route_digest(experts[:1])
    changed = experts[:1].repeat(CHOICES * EXPERTS, 1)
    for row, (place, expert) in enumerate(itertools.product(range(CHOICES), range(EXPERTS))):
        changed[row, place] = expert
    same = (changed == experts[:1]).all(1)
    assert same.sum() == CHOICES
    assert torch.equal(ops.route_digest(changed) == before, same)


def test_two_experts_in_exchanged_places_are_another_digest(experts: torch.Tensor) -> None:
    before, pairs = ops.route_digest(experts[:1]), list(itertools.combinations(range(CHOICES), 2))
    changed = experts[:1].repeat(len(pairs), 1)
    for row, (a, b) in enumerate(pairs):
        changed[row, a], changed[row, b] = experts[0, b], experts[0, a]
    assert torch.equal(ops.route_digest(changed) == before, (changed == experts[:1]).all(1))


def test_random_choices_hardly_ever_meet() -> None:
    many = torch.randint(0, EXPERTS, (40_000, CHOICES), generator=torch.Generator().manual_seed(1))
    # 40,000 draws of 2 ** 31 have 0.37 pairs in common on average
    assert len(ops.route_digest(many).unique()) >= 40_000 - 4


def test_loads_count_each_valid_tokens_choices_a_layer(experts: torch.Tensor) -> None:
    valid = torch.arange(9) % 3 != 1
    loads = ops.expert_loads(experts, valid, 5, EXPERTS)
    expected = torch.zeros(5, EXPERTS, dtype=torch.int64)
    for token, row in enumerate(experts.tolist()):
        for n, expert in enumerate(row):
            expected[n // (CHOICES // 5), expert] += int(valid[token])
    assert torch.equal(loads, expected) and loads.sum() == 6 * CHOICES


def test_probabilities_are_summed_over_valid_tokens_and_differentiable() -> None:
    logits, valid = torch.randn(7, 5, generator=torch.Generator().manual_seed(2)), torch.arange(7) < 5
    logits[5:] = float("nan")  # padding must not reach the sum
    torch.testing.assert_close(ops.router_probabilities(logits, valid), torch.softmax(logits[:5], 1).sum(0))
    exact = logits[:5].double().requires_grad_()
    assert gradcheck(lambda x: ops.router_probabilities(x, valid[:5]), exact)
    mine = logits.requires_grad_()
    (grad,) = torch.autograd.grad(ops.router_probabilities(mine, valid), mine, torch.arange(5.0))
    assert (grad[5:] == 0).all() and grad[:5].abs().sum() > 0


def test_a_shared_prefix_counts_once_for_each_sequence() -> None:
    """Of packed tokens: a prefix of two sequences, of which the second has no rows, both these, one alone, padding."""
    layout = [[0, 3, 5, 5, 9, 9, 9], [0, 0, 0, 0, 0, 0], [0, 3, 3, 0, 0, 0]]
    times = ops.times_in_sequences(torch.zeros(11, dtype=torch.int64), *(torch.tensor(x).int() for x in layout))
    assert times.tolist() == [2, 2, 2, 1, 1, 1, 1, 1, 1, 0, 0]
