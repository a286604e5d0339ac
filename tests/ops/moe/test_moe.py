"""Routing, dispatch, grouped products and combine: meaning, ties, gradients, and independence of the batch."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import gradcheck

from lockstep.ops import linear
from lockstep.ops.moe import grouped_linear, routing
from lockstep.ops.records import RouteSettings

SOFTMAX = dict(slots=3, sigmoid=False, groups=1, kept_groups=1, normalize=True, scale=1.0)
DEEPSEEK = dict(slots=4, sigmoid=True, groups=4, kept_groups=2, normalize=True, scale=2.5)


def route(logits: torch.Tensor, bias: torch.Tensor | None = None, **settings):
    return routing.route(logits, bias, RouteSettings(**(SOFTMAX | settings)))


def wide(*shape: int, seed: int = 0) -> torch.Tensor:
    """Values over many orders of magnitude."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    return x * torch.exp(2 * torch.randn(shape, generator=generator))


def test_softmax_routing_is_topk_of_the_softmax() -> None:
    logits = torch.randn(50, 16, generator=torch.Generator().manual_seed(0))
    weights, experts = route(logits)
    expected, indices = torch.softmax(logits, 1).topk(3)
    assert torch.equal(experts, indices)
    torch.testing.assert_close(weights, expected / expected.sum(1, keepdim=True))
    assert torch.equal(route(logits, normalize=False)[0], expected)


def test_group_limited_routing_matches_its_definition() -> None:
    logits, bias = wide(40, 16), wide(16, seed=1)
    weights, experts = route(logits, bias, **DEEPSEEK)
    scores = torch.sigmoid(logits)
    for t in range(40):
        choice = (scores[t] + bias).view(4, 4)
        kept = choice.topk(2).values.sum(1).topk(2).indices
        eligible = torch.full((4, 4), float("-inf"))
        eligible[kept] = choice[kept]
        assert set(eligible.flatten().topk(4).indices.tolist()) == set(experts[t].tolist())
        chosen = scores[t, experts[t]]
        torch.testing.assert_close(weights[t], 2.5 * chosen / chosen.sum())


def test_the_lower_index_wins_among_equal_scores() -> None:
    logits = torch.zeros(3, 8)
    logits[1, 5] = 1.0
    logits[2] = torch.tensor([-1.0, 0.0, -0.0, -1.0, 0.0, -2.0, 0.0, 0.0])
    experts = route(logits)[1].tolist()
    assert experts == [[0, 1, 2], [5, 0, 1], [1, 2, 4]]


@pytest.mark.parametrize("settings", [SOFTMAX, SOFTMAX | {"normalize": False, "scale": 3.0}, DEEPSEEK])
def test_router_gradients(settings: dict) -> None:
    logits = torch.randn(6, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    experts = route(logits.float(), **settings)[1]

    def weights(logits: torch.Tensor) -> torch.Tensor:
        scores = torch.sigmoid(logits) if settings["sigmoid"] else torch.softmax(logits, 1)
        chosen = scores.gather(1, experts)
        return settings["scale"] * (chosen / chosen.sum(1, keepdim=True) if settings["normalize"] else chosen)

    exact = logits.clone().requires_grad_()
    grad = torch.randn(experts.shape, dtype=torch.float64)
    (expected,) = torch.autograd.grad(weights(exact), exact, grad)
    mine = logits.float().requires_grad_()
    (found,) = torch.autograd.grad(route(mine, **settings)[0], mine, grad.float())
    assert (found - expected).abs().max() < 1e-6 * expected.abs().max().clamp(min=1)


@pytest.mark.parametrize("settings", [SOFTMAX, DEEPSEEK])
def test_a_row_is_routed_alike_in_any_batch(settings: dict) -> None:
    logits, weight = wide(130, 64), wide(16, 64, seed=1)
    scores = routing.router_logits(logits, weight)
    weights, experts = route(scores, **settings)
    for rows in ([0], [7, 3], list(range(64, 129)), list(range(129, -1, -1))):
        some = routing.router_logits(logits[rows], weight)
        assert torch.equal(some, scores[rows])
        again = route(some, **settings)
        assert torch.equal(again[0], weights[rows]) and torch.equal(again[1], experts[rows])


def test_the_plan_sorts_stably_and_inverts() -> None:
    experts = torch.tensor([[2, 0], [2, 4], [0, 2]])
    order, row, offsets = routing.dispatch_plan(experts, 6)
    assert order.tolist() == [1, 4, 0, 2, 5, 3]
    assert offsets.tolist() == [0, 2, 2, 5, 5, 6, 6] and offsets.dtype == torch.int32
    assert torch.equal(order[row.flatten()], torch.arange(6))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["random", "one", "empty"])
def test_grouped_products_are_linear_row_by_row(name: str, dtype: torch.dtype) -> None:
    x, weight = wide(37, 24).to(dtype), wide(5, 40, 24, seed=3).to(dtype)
    bounds = {
        "random": [0, 3, 4, 20, 36, 37],
        "one": [0, 0, 37, 37, 37, 37],
        "empty": [0, 0, 0, 1, 1, 37],
    }
    offsets = torch.tensor(bounds[name], dtype=torch.int32)
    out, bias = grouped_linear.grouped_linear(x, weight, offsets), wide(5, 40, seed=4).to(dtype)
    biased = grouped_linear.grouped_linear(x, weight, offsets, bias)
    for g in range(5):
        start, end = bounds[name][g : g + 2]
        for r in range(start, end):
            assert torch.equal(out[r : r + 1], linear(x[r : r + 1], weight[g]))
            assert torch.equal(biased[r : r + 1], linear(x[r : r + 1], weight[g], bias[g]))


def test_gradients_through_dispatch_products_and_combine() -> None:
    generator = torch.Generator().manual_seed(4)
    experts = torch.randint(0, 4, (7, 2), generator=generator)
    experts[:, 1] = (experts[:, 0] + 1) % 4
    order, row, offsets = routing.dispatch_plan(experts, 5)  # the last expert has no rows
    x, w = torch.randn(7, 6, generator=generator), torch.randn(5, 6, 6, generator=generator)
    weights, bias = torch.rand(7, 2, generator=generator), torch.randn(5, 6, generator=generator)

    def ours(x, w, weights, bias):
        y = grouped_linear.grouped_linear(routing.dispatch(x, order, row), w, offsets, bias)
        return routing.combine(y, row, weights)

    def plain(x, w, weights, bias):
        return torch.einsum("tk,tkn->tn", weights, torch.einsum("td,tknd->tkn", x, w[experts]) + bias[experts])

    inputs = [t.requires_grad_() for t in (x, w, weights, bias)]
    grad = torch.randn(7, 6, generator=generator)
    torch.testing.assert_close(ours(*inputs), plain(*inputs))
    for found, expected in zip(
        torch.autograd.grad(ours(*inputs), inputs, grad), torch.autograd.grad(plain(*inputs), inputs, grad), strict=True
    ):
        torch.testing.assert_close(found, expected)
    assert gradcheck(plain, [t.detach().double().requires_grad_() for t in inputs])
