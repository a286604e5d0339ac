"""The search for a filtered support under Triton's interpreter, against the reference's sort.

As in `test_kernels_interpret`, one test runs `Interpreted` in a process of its own.
"""

import os
from collections.abc import Sequence

import pytest
import torch
from processes import run_interpreted
from torch import Tensor

from lockstep.ops.logprobs import reference as logprobs_reference

if os.environ.get("TRITON_INTERPRET") == "1":
    from lockstep.ops.logprobs import triton_topk_topp

VOCABULARY = 17_003  # more than the sample, so that the bracket is a guess


def test_kernels_under_the_interpreter():
    run_interpreted(__file__)


def logits(kind: str, vocabulary: int = VOCABULARY, samples: int = 8192) -> Tensor:
    z = torch.randn(1, vocabulary)
    if kind == "equal":
        return torch.zeros(1, vocabulary)
    if kind == "masked":  # a padded LM head
        z[:, vocabulary // 4 : vocabulary // 2] = -torch.inf
    if kind.startswith("misleading"):  # what is sampled says nothing of the rest
        column = torch.arange(vocabulary)
        z[:, column % (vocabulary // (samples // 8)) < 8] += -5 if kind == "misleading" else 5
    return z


# top-k, top-p, min-p
FILTERS = [(0, 0.95, 0.0), (0, 0.9999, 0.0), (0, 1e-6, 0.0), (50, 1.0, 0.0), (8000, 1.0, 0.0)]
FILTERS += [(VOCABULARY + 5, 1.0, 0.0), (300, 0.7, 0.0), (20, 0.9, 0.6), (0, 1.0, 0.0)]


def found(z: Tensor, filters: Sequence[tuple[int, float, float]] = FILTERS) -> Tensor:
    """The thresholds of one row under every filter."""
    rows = len(filters)
    top_k, top_p, min_p = (torch.tensor(column) for column in zip(*filters, strict=True))
    z, one, none = z.expand(rows, -1).contiguous(), torch.ones(rows), torch.full((rows,), -torch.inf)
    maximum, total = z.amax(1), torch.exp(z - z.amax(1, keepdim=True)).sum(1)
    least, _ = triton_topk_topp.find_thresholds(z, one, top_k.int(), maximum)
    assert torch.equal(least == none, (top_k == 0) | (z.isfinite().sum(1) < top_k.clamp(max=z.shape[1])))
    threshold, smallest = triton_topk_topp.find_thresholds(
        z, one, top_p, maximum, triton_topk_topp.Mass(total, min_p, least)
    )
    assert torch.equal(smallest, threshold), "at temperature 1"
    return threshold


class Interpreted:
    @pytest.fixture(autouse=True)
    def seed(self):
        torch.manual_seed(0)

    @pytest.mark.parametrize("kind", ["normal", "equal", "masked", "misleading"])
    def test_threshold_is_the_reference_s(self, kind):
        """Equal logits are too many for the list, and misleading ones are not in it: the row itself is searched."""
        z = logits(kind)
        top_k, top_p, min_p = (torch.tensor(column) for column in zip(*FILTERS, strict=True))
        expected = logprobs_reference.support_threshold(z.expand(len(FILTERS), -1), top_k, top_p, min_p)
        result = found(z)
        off = expected == -torch.inf
        assert torch.equal(result[off], expected[off]), "no filter keeps everything"
        kept, expected_kept = z >= result.unsqueeze(1), z >= expected.unsqueeze(1)
        assert kept.sum(1).tolist() == expected_kept.sum(1).tolist()

    @pytest.mark.parametrize("kind", ["normal", "misleading", "misleading upwards"])
    def test_a_range_that_registers_do_not_hold_is_narrowed(self, kind, monkeypatch):
        """Of a list that is whole (half of the row) or not (a fortieth), and of a row that the bracket missed."""
        z, filters = logits(kind, 301, 64), [(0, 0.95, 0.0), (100, 0.7, 0.0)]
        expected = found(z, filters)
        monkeypatch.setattr(triton_topk_topp, "SAMPLES", 64)
        monkeypatch.setattr(triton_topk_topp, "CAPACITY", 32)
        for share in (2, 40):
            monkeypatch.setattr(triton_topk_topp, "LIST_SHARE", share)
            assert torch.equal(found(z, filters).view(torch.int32), expected.view(torch.int32))

    def test_the_order_of_a_row_does_not_matter(self):
        """Another order is another sample, another bracket and other blocks."""
        z = (2 * logits("normal")).round()  # many equal ones
        assert torch.equal(found(z), found(z[:, torch.randperm(VOCABULARY)]))


def test_masses_do_not_depend_on_the_order():
    torch.manual_seed(0)
    z = torch.randn(40, VOCABULARY) * 3
    p = torch.linspace(0.05, 0.999, 40)
    none = torch.zeros(40)
    first = logprobs_reference.support_threshold(z, none.int(), p, none)
    assert torch.equal(
        first, logprobs_reference.support_threshold(z[:, torch.randperm(VOCABULARY)], none.int(), p, none)
    )
    mass = torch.softmax(z.double(), 1)
    above = torch.where(z > first.unsqueeze(1), mass, 0.0).sum(1)
    upto = torch.where(z >= first.unsqueeze(1), mass, 0.0).sum(1)
    assert (above < p + 1e-6).all() and (upto > p - 1e-6).all()
