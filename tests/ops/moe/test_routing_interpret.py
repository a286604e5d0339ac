"""The kernels that choose experts and sort rows by them, under Triton's interpreter, against the plain torch path.

As in `test_kernels_interpret`, one test runs `Interpreted` in a process of its own.
"""

import os

import pytest
import torch
from processes import run_interpreted

from lockstep.ops.moe import routing
from lockstep.ops.records import RouteSettings

if os.environ.get("TRITON_INTERPRET") == "1":
    from lockstep.ops.moe import triton_routing as kernels

SOFTMAX = (3, False, 1, 1, True, 1.0)
SETTINGS = {
    "softmax": (12, False, SOFTMAX),
    "softmax, not normalized": (16, False, (4, False, 1, 1, False, 2.0)),
    "sigmoid, bias": (16, True, (5, True, 1, 1, True, 2.5)),
    "groups of 4": (16, True, (4, True, 4, 2, True, 2.5)),
    "groups of 5, three kept": (30, True, (6, True, 6, 3, False, 1.0)),
    "groups of one": (8, False, (2, True, 8, 3, True, 1.0)),
}


def test_kernels_under_the_interpreter():
    run_interpreted(__file__)


class Interpreted:
    @pytest.fixture(autouse=True)
    def seed(self):
        torch.manual_seed(0)

    @pytest.mark.parametrize("name", SETTINGS)
    def test_routes(self, name):
        experts, biased, settings = SETTINGS[name]
        logits = torch.randn(40, experts) * torch.exp(torch.randn(40, experts))
        logits[:5] = torch.randint(-1, 2, (5, experts)) * 1.0  # ties
        logits[5:7] = 0.0
        logits[6, ::2] = -0.0
        bias = torch.randint(-2, 3, (experts,)) * 0.25 if biased else None
        weights, chosen = kernels.route(logits, bias, RouteSettings(*settings))
        expected_weights, expected = routing.route(logits, bias, RouteSettings(*settings))
        assert torch.equal(chosen, expected)
        torch.testing.assert_close(weights, expected_weights, rtol=1e-6, atol=0)

    @pytest.mark.parametrize(("tokens", "block"), [(1, 4096), (37, 4096), (37, 16), (200, 64)])
    def test_plans(self, tokens, block, monkeypatch):
        monkeypatch.setattr(kernels, "MAX_PLAN_BLOCK", block)
        experts = torch.rand(tokens, 11).pow(3).topk(3).indices + 1  # the first and the last have no rows
        for mine, wanted in zip(kernels.dispatch_plan(experts, 13), routing.dispatch_plan(experts, 13), strict=True):
            assert mine.dtype == wanted.dtype and torch.equal(mine, wanted)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_rows_are_their_tokens(self, dtype):
        x = torch.randn(5, 2 * 33).to(dtype)[:, 33:]
        order, row, _ = routing.dispatch_plan(torch.randint(0, 7, (5, 3)), 7)
        assert torch.equal(kernels.dispatch(x, order, row), x[order // 3])
