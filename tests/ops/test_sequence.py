"""Sums over each sequence's tokens: against float64, the same bits wherever a sequence stands, and their gradient."""

import os

import pytest
import torch
from processes import run_interpreted

from lockstep import ops

if os.environ.get("TRITON_INTERPRET") == "1":
    from lockstep.ops.sequence import triton as sequence_triton

LENGTHS = [1, 700, 3, 2500, 0, 17, 1024]


def case(rows: int, front: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Values of sequences of `LENGTHS` after `front` other tokens, and rows of padding; where they end."""
    draw = torch.Generator().manual_seed(0)
    values = torch.randn(sum(LENGTHS), generator=draw)
    values = torch.cat((torch.ones(front), values, torch.full((rows,), torch.nan)))
    ends = [0, front, *(front + sum(LENGTHS[: i + 1]) for i in range(len(LENGTHS)))]
    return values, torch.tensor(ends + [ends[-1]] * 2, dtype=torch.int32)


def expected(values: torch.Tensor, cu: torch.Tensor) -> torch.Tensor:
    found = torch.zeros(len(values), dtype=torch.float64)
    for start, end in zip(cu[:-1].tolist(), cu[1:].tolist(), strict=True):
        found[start:end] = values[start:end].double().sum()
    return found


def test_kernels_under_the_interpreter():
    run_interpreted(__file__)


@pytest.mark.parametrize("rows", [0, 5])
def test_each_token_has_the_sum_of_its_sequence(rows: int) -> None:
    values, cu = case(rows)
    torch.testing.assert_close(ops.sequence_sum(values, cu).double(), expected(values, cu), rtol=1e-5, atol=1e-4)


def test_where_a_sequence_stands_changes_no_bit() -> None:
    values, cu = case(0)
    alone = ops.sequence_sum(values, cu)
    for front in (1, 3, 64, 1001):
        assert torch.equal(ops.sequence_sum(*case(2, front))[front:-2], alone)


def test_the_gradient() -> None:
    values, cu = case(4)
    values = values.nan_to_num(1.0).double().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: ops.sequence_sum(x, cu[:4]), (values[:40].detach().requires_grad_(),))
    grad = torch.randn(len(values), dtype=torch.float64)
    (found,) = torch.autograd.grad(ops.sequence_sum(values, cu), values, grad)
    torch.testing.assert_close(found, expected(grad, cu))
    (of_sum,) = torch.autograd.grad(ops.sequence_sum(values, cu).sum(), values)  # a gradient of stride 0
    torch.testing.assert_close(of_sum, expected(torch.ones(len(values)), cu))


class Interpreted:
    def test_the_kernel_is_the_reference(self):
        for front in (0, 3):
            values, cu = case(5, front)
            found = sequence_triton.sequence_sum(values, cu)
            torch.testing.assert_close(found.double(), expected(values, cu), rtol=1e-5, atol=1e-4)
            assert not found[-5:].any()
        expanded = torch.ones(1).expand(len(values))
        assert torch.equal(sequence_triton.sequence_sum(expanded, cu), ops.sequence_sum(expanded, cu))
