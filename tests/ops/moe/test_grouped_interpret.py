"""The grouped products' kernels on a CPU, under Triton's interpreter, against products of each group.

As in `test_kernels_interpret.py`, one test runs `Interpreted` in a process of its own.
"""

import os

import pytest
import torch
from processes import run_interpreted
from torch import Tensor

if os.environ.get("TRITON_INTERPRET") == "1":
    from lockstep.ops.moe import triton_grouped

SIZES = (5, 0, 133, 64, 1, 140)
OTHERS = (1, 3, 5)  # groups whose rows and weights are not finite: next to the others, and the last


def test_kernels_under_the_interpreter():
    run_interpreted(__file__)


def weights(columns: int, depth: int, *, k_innermost: bool) -> Tensor:
    if k_innermost:
        return torch.randn(len(SIZES), columns, depth).half().transpose(1, 2)
    return torch.randn(len(SIZES), depth, columns).half()


class Interpreted:
    @pytest.fixture(autouse=True)
    def three_multiprocessors(self, monkeypatch):
        torch.manual_seed(0)
        monkeypatch.setattr(triton_grouped, "_multiprocessors", lambda _: 3)

    @pytest.mark.parametrize(
        ("rows", "k_innermost", "columns", "depth", "described"),
        [
            (rows, (i + j) % 2 == 0, *shape)  # so that any two of them meet
            for i, rows in enumerate((16, 96, 1))  # the mean of a group up to which a configuration is taken
            for j, shape in enumerate(
                [(96, 128, (True, True)), (264, 64, (True, True)), (40, 72, (True, False)), (30, 100, (False, False))]
            )
        ],
    )
    def test_products_are_those_of_each_group(self, rows, k_innermost, columns, depth, described, monkeypatch):
        monkeypatch.setattr(triton_grouped, "_SMALL_ROWS", 100 if rows == 16 else 0)
        monkeypatch.setattr(triton_grouped, "_MEDIUM_ROWS", 100 if rows == 96 else 0)
        offsets = torch.tensor((0, *SIZES)).cumsum(0).int()
        x, w = torch.randn(sum(SIZES), depth).half(), weights(columns, depth, k_innermost=k_innermost)
        found = triton_grouped._descriptors(x, w, triton_grouped._choose_config(len(x), len(SIZES)))
        assert (found is not None) == described[0 if k_innermost else 1] or rows == 16
        own = torch.ones(len(x), dtype=torch.bool)
        for g in OTHERS:
            w[g] = torch.inf
            x[offsets[g] : offsets[g + 1]] = torch.nan
            own[offsets[g] : offsets[g + 1]] = False
        out = triton_grouped.grouped_matmul(x, w, offsets)
        spans = zip(offsets.tolist(), offsets[1:].tolist(), strict=False)
        exact = torch.cat([x[a:b].float() @ w[g].float() for g, (a, b) in enumerate(spans)])
        torch.testing.assert_close(out[own].float(), exact[own], atol=2e-2, rtol=1e-3)
        bias, group = 100 * torch.randn(len(SIZES), columns).half(), torch.arange(len(SIZES))
        biased = triton_grouped.grouped_matmul(x, w, offsets, bias)
        sums = exact + bias.float()[group.repeat_interleave(torch.tensor(SIZES))]
        torch.testing.assert_close(biased[own].float(), sums[own], atol=2e-3, rtol=2**-11)  # rounded once
        assert out[~own].isnan().all()

    def test_sums_are_those_of_each_group(self):
        offsets, x = torch.tensor((0, *SIZES)).cumsum(0).int(), torch.randn(sum(SIZES), 130)
        exact = torch.stack(
            [x[a:b].double().sum(0) for a, b in zip(offsets.tolist(), offsets.tolist()[1:], strict=False)]
        )
        found = triton_grouped.grouped_sum(x, offsets)
        torch.testing.assert_close(found.double(), exact, atol=1e-5, rtol=1e-5)
        assert not found[1].any(), "a group without rows"
