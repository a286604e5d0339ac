"""The kernels of the gradient norm under Triton's interpreter, against the reference.

As in `test_kernels_interpret`, one test runs `Interpreted` in a process of its own.
"""

from __future__ import annotations

import os

import pytest
import torch
from exact_sums import numbers, odd_words
from processes import run_interpreted

from lockstep import ops

if os.environ.get("TRITON_INTERPRET") == "1":
    from lockstep.ops.gradient_norm import triton as kernels


def test_kernels_under_the_interpreter() -> None:
    run_interpreted(__file__)


class Interpreted:
    @pytest.mark.parametrize("size", [1, 8192, 20_001])
    def test_square_sums(self, size: int) -> None:
        x = torch.randn(size, generator=torch.Generator().manual_seed(size))
        exact = torch.stack([part.double().square().sum() for part in x.split(1024)]).float()
        torch.testing.assert_close(kernels.square_sums(x), exact)
        torch.testing.assert_close(ops.square_sums(x), exact)

    def test_the_sum_of_a_block_is_its_own_wherever_it_stands(self) -> None:
        x = torch.randn(20 * 1024, generator=torch.Generator().manual_seed(0))
        order = torch.randperm(20, generator=torch.Generator().manual_seed(1))
        moved = x.view(20, 1024)[order].flatten()
        for square_sums in (kernels.square_sums, ops.square_sums):
            assert torch.equal(square_sums(moved), square_sums(x)[order])

    @pytest.mark.parametrize("kind", ["near", "wide", "bits", "subnormal"])
    @pytest.mark.parametrize("count", [1, 255, 70_000])  # of one program, and of several with several turns
    def test_an_exact_sum_has_the_words_of_the_reference(self, kind: str, count: int) -> None:
        x = numbers(count, kind, seed=count)
        words = ops.exact_sum(x)
        assert torch.equal(kernels.exact_sum(x), words)
        assert torch.equal(kernels.root_of_sum(words), ops.root_of_sum(words))

    def test_the_root_of_a_sum_is_rounded_as_the_reference_rounds_it(self) -> None:
        for words in odd_words():
            assert torch.equal(kernels.root_of_sum(words), ops.root_of_sum(words))

    def test_what_is_not_finite_is_counted(self) -> None:
        x = numbers(3000, "wide", seed=0)
        for at, bad in ((7, torch.inf), (2999, -torch.nan)):
            x[at] = bad
            words = ops.exact_sum(x)
            assert torch.equal(kernels.exact_sum(x), words)
            found = [root(words).view(torch.int32) for root in (kernels.root_of_sum, ops.root_of_sum)]
            assert torch.equal(*found) and not found[0].view(torch.float32).isfinite()
