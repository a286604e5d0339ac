"""The backward kernel of the log-probabilities under Triton's interpreter, against the torch formula and autograd.

As in `test_kernels_interpret`, one test runs `Interpreted` in a process of its own, in float32.
"""

import os

import pytest
import torch
from processes import run_interpreted

from lockstep.ops.logprobs import operator as logprobs_operator
from lockstep.ops.logprobs import reference as logprobs_reference
from lockstep.ops.records import Filters, ScoredRows

if os.environ.get("TRITON_INTERPRET") == "1":
    from lockstep.ops.logprobs import triton_backward as kernels

ROWS, DIM = 6, 20


def test_kernels_under_the_interpreter():
    run_interpreted(__file__)


class Interpreted:
    @pytest.fixture(autouse=True)
    def nan_for_unwritten(self):
        torch.manual_seed(0)
        torch.use_deterministic_algorithms(True)  # fills new memory
        yield
        torch.use_deterministic_algorithms(False)

    def case(self, vocabulary: int, kind: str) -> tuple[torch.Tensor, tuple]:
        """Logits, and what `grad_logits` is given beside them and the range's first column. Some rows are greedy, some
        have no gradient."""
        logits = torch.randint(-4, 5, (ROWS, DIM)) / 4 @ (torch.randint(-16, 17, (vocabulary, DIM)) / 8).t()
        targets = torch.randint(vocabulary, (ROWS,))
        targets[0], targets[1] = 0, vocabulary - 1
        temperature = torch.tensor([1.0, 0.7, 0.0, 2.0, 1.0, 0.3])
        truncated = kind == "truncated"
        top_k = torch.tensor([5, 3, 0, 0, 40, 1], dtype=torch.int32) * truncated
        top_p = torch.tensor([1.0, 0.9, 1.0, 0.5, 1.0, 1.0]) if truncated else torch.ones(ROWS)
        kept = (torch.rand_like(logits) < 0.5).scatter_(1, targets.unsqueeze(1), True)
        support = logprobs_reference.pack_support(kept) if kind == "support" else None
        filters = Filters(temperature, top_k, top_p, torch.zeros(ROWS))
        stats = logprobs_reference.statistics(logits, filters, support, truncated, False)
        grads = torch.randn(2, ROWS)
        grads[0, 3] = grads[1, 4] = 0
        return logits, (ScoredRows(targets, temperature, support, *stats[:3], truncated), *grads)

    @pytest.mark.parametrize("vocabulary", [5, 256, 603])
    @pytest.mark.parametrize("kind", ["plain", "truncated", "support"])
    def test_formula(self, vocabulary, kind):
        logits, arguments = self.case(vocabulary, kind)
        expected = logprobs_operator.grad_logits(logits, *arguments)
        result = kernels.grad_logits(logits, 0, *arguments, torch.float32)
        assert result.dtype == torch.float32
        torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-6)
        ranges = [(i, logits[:, i : i + 256]) for i in range(0, vocabulary, 256)]
        parts = [kernels.grad_logits(some, i, *arguments, torch.float32) for i, some in ranges]
        assert torch.equal(torch.cat(parts, dim=1), result), "a range of the vocabulary at a time"

    @pytest.mark.parametrize("kind", ["plain", "truncated", "support"])
    @pytest.mark.parametrize("absent", [0, 1])
    def test_one_of_the_gradients_is_absent(self, kind, absent):
        logits, (by, grad_sampled, grad_model) = self.case(100, kind)
        grads, zero = [grad_sampled, grad_model], torch.zeros(ROWS)
        grads[absent] = zero
        expected = kernels.grad_logits(logits, 0, by, *grads, torch.float32)
        grads[absent] = None
        result = kernels.grad_logits(logits, 0, by, *grads, torch.float32)
        torch.testing.assert_close(result, expected, rtol=1e-6, atol=1e-7)
        formula = logprobs_operator.grad_logits(logits, by, *grads)
        torch.testing.assert_close(result, formula, rtol=1e-5, atol=1e-6)

    @pytest.mark.parametrize("kind", ["plain", "truncated", "support"])
    def test_autograd(self, kind):
        """Of the definition, in float64: log-softmax over the support of the tempered logits, and of the logits."""
        logits, arguments = self.case(100, kind)
        (targets, temperature, support, _, _, threshold, _), grad_sampled, grad_model = arguments
        result = kernels.grad_logits(logits, 0, *arguments, torch.float32)
        divisor = logprobs_reference.divisor(temperature).unsqueeze(1)
        kept = logits / divisor >= threshold.unsqueeze(1)
        if support is not None:
            kept = logprobs_reference.unpack_support(support, 100)
        x = logits.double().requires_grad_()
        z = x / divisor.double()
        lse = torch.logsumexp(z.masked_fill(~kept, -torch.inf), 1)
        sampled = torch.where(temperature > 0, z.gather(1, targets.unsqueeze(1)).squeeze(1) - lse, 0.0)
        model = torch.log_softmax(x, 1).gather(1, targets.unsqueeze(1)).squeeze(1)
        (exact,) = torch.autograd.grad((sampled * grad_sampled + model * grad_model).sum(), x)
        torch.testing.assert_close(result.double(), exact, rtol=1e-4, atol=1e-5)

    def test_rows_do_not_see_each_other(self):
        logits, arguments = self.case(100, "truncated")
        logits[3] = torch.nan
        result = kernels.grad_logits(logits, 0, *arguments, torch.float32)
        assert result.isnan().any(1).tolist() == [False, False, False, True, False, False]

    def test_rows_without_a_gradient_are_zero_whatever_they_hold(self):
        logits, (by, grad_sampled, grad_model) = self.case(100, "plain")
        padding = torch.tensor([False, True, True, False, False, True])
        logits[padding] = torch.nan
        none = torch.zeros(ROWS)
        for own in (padding, torch.ones(ROWS, dtype=torch.bool)):
            grads = (torch.where(own, none, g) for g in (grad_sampled, grad_model))
            result = kernels.grad_logits(logits, 0, by, *grads, torch.float32)
            assert not result[own].any() and (result[~own] != 0).any(1).all()


@pytest.mark.parametrize("with_support", [True, False])
def test_operator_under_fake_tensors(with_support):
    """As a trace for a GPU calls it: nothing is launched, gradients have the shapes and dtypes of their inputs."""
    with torch._subclasses.FakeTensorMode():
        hidden, weight = (torch.empty(n, 16, dtype=torch.bfloat16, device="cuda") for n in (9, 50))
        targets, number = torch.empty(9, dtype=torch.int64, device="cuda"), torch.empty(9, device="cuda")
        support = torch.empty(9, 7, dtype=torch.uint8, device="cuda") if with_support else None
        grads = logprobs_operator.token_logprobs_backward(
            number, number, hidden, weight, ScoredRows(targets, number, support, number, number, number, True)
        )
    assert [(g.shape, g.dtype, g.device) for g in grads] == [(x.shape, x.dtype, x.device) for x in (hidden, weight)]
