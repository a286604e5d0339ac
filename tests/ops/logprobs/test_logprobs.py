"""Log-probabilities and their gradients on this CPU, against float64 autograd of the definition."""

import pytest
import torch
from torch import Tensor

from lockstep import ops
from lockstep.ops.linear.operator import linear_fp32
from lockstep.ops.logprobs import operator as logprobs_operator
from lockstep.ops.logprobs import reference as logprobs_reference
from lockstep.ops.records import ScoredRows

ROWS, DIM, VOCABULARY = 7, 12, 53


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def inputs() -> tuple[Tensor, Tensor, Tensor, ops.Filters]:
    hidden, weight = torch.randn(ROWS, DIM), torch.randn(VOCABULARY, DIM)
    temperature = torch.tensor([1.0, 0.7, 2.0, 1.0, 0.0, 0.3, 1.0])
    filters = torch.tensor([0, 9, 0, 0, 0, 40, 0], dtype=torch.int32), torch.full((ROWS,), 0.9), torch.zeros(ROWS)
    return hidden, weight, torch.randint(VOCABULARY, (ROWS,)), ops.Filters(temperature, *filters)


def definition(hidden: Tensor, weight: Tensor, targets: Tensor, temperature: Tensor, threshold: Tensor):
    logits = hidden @ weight.t()
    z = logits / torch.where(temperature > 0, temperature, 1.0).unsqueeze(1)
    lse = z.masked_fill(z < threshold.unsqueeze(1) - 1e-5, -torch.inf).logsumexp(1)  # which is one of float32's
    sampled = torch.where(temperature > 0, z.gather(1, targets.unsqueeze(1)).squeeze(1) - lse, 0.0)
    return sampled, logits.log_softmax(1).gather(1, targets.unsqueeze(1)).squeeze(1)


@pytest.mark.parametrize("use", [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("chunk", [2, 1024])
def test_gradients_of_either_and_both(use, chunk, monkeypatch):
    monkeypatch.setattr(logprobs_operator, "CHUNK", chunk)
    hidden, weight, *rest = inputs()
    leaves = [hidden.requires_grad_(), weight.requires_grad_()]
    out = ops.token_logprobs(*leaves, *rest, None, True)
    doubles = [x.detach().double().requires_grad_() for x in leaves]
    exact = definition(*doubles, rest[0], rest[1].temperature_C.double(), out.threshold_C)
    grads = [g for g, used in zip(torch.randn(2, ROWS), use, strict=True) if used]

    def chosen(pair):
        return [x for x, used in zip(pair, use, strict=True) if used]

    torch.testing.assert_close(out.logprob_C.double(), exact[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(out.model_logprob_C.double(), exact[1], rtol=1e-5, atol=1e-5)
    found = torch.autograd.grad(chosen(out[:2]), leaves, grads)
    expected = torch.autograd.grad(chosen(exact), doubles, [g.double() for g in grads])
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("with_support", [True, False])
def test_logits_that_are_kept_give_the_words_of_those_that_are_not(dtype, with_support, monkeypatch):
    monkeypatch.setattr(logprobs_operator, "CHUNK", 3)
    hidden, weight, targets, filters = inputs()
    hidden, weight = hidden.to(dtype), weight.to(dtype)
    logits = linear_fp32(hidden, weight)
    kept = (torch.rand_like(logits) < 0.5).scatter_(1, targets.unsqueeze(1), True)
    support = logprobs_reference.pack_support(kept) if with_support else None
    apart = logprobs_operator._token_logprobs(hidden, weight, targets, filters, support, True)
    found = logprobs_operator.score_logits(logits, targets, filters, support, True)
    by = ScoredRows(targets, filters.temperature_C, support, *apart[3:], True)
    arguments = (*torch.randn(2, ROWS), hidden, weight, by)
    apart = (*apart, *logprobs_operator.token_logprobs_backward(*arguments))
    found = (*found, *logprobs_operator.token_logprobs_backward(*arguments, logits))
    assert len(apart) == 8 and all(map(torch.equal, apart, found))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_rows_have_empty_results_and_no_gradient(dtype):
    hidden, weight, targets, filters = inputs()
    hidden, weight = hidden[:0].to(dtype).requires_grad_(), weight.to(dtype).requires_grad_()
    filters = ops.Filters(*(x[:0] for x in filters))
    out = ops.token_logprobs(hidden, weight, targets[:0], filters, None, True)
    assert all(x.shape == (0,) for x in out)
    assert not torch.autograd.grad(out.logprob_C.sum(), weight)[0].any()
    assert ops.support_mask(hidden, weight, filters.temperature_C, out.threshold_C).shape == (0, -(-VOCABULARY // 8))


def test_the_entropy_has_no_gradient():
    hidden, weight, *rest = inputs()
    out = ops.token_logprobs(hidden.requires_grad_(), weight, *rest, None, True)
    assert not out.entropy_C.requires_grad and not out.threshold_C.requires_grad and out.logprob_C.requires_grad


def test_top_p_is_of_what_top_k_kept():
    z, p = torch.tensor([[0.1, 0.4, 0.3, 0.2]]).log(), torch.tensor([0.5])
    first, second = (logprobs_reference.support_threshold(z, torch.tensor([k]), p, torch.zeros(1)) for k in (2, 4))
    assert first.item() == z[0, 1].item() and second.item() == z[0, 2].item()


def test_a_token_outside_a_given_support_may_be_far_more_likely_than_all_within():
    """As after an update, at a low temperature: its exponential relative to the support's sum exceeds float32."""
    hidden, weight, targets, filters = inputs()
    filters = filters._replace(temperature_C=torch.full((ROWS,), 0.01))
    logits = linear_fp32(hidden, weight)
    targets = logits.argmin(1)
    kept = torch.zeros_like(logits, dtype=torch.bool).scatter_(1, targets.unsqueeze(1), True)
    kept[:, 0] = True
    leaves = [hidden.requires_grad_(), weight.requires_grad_()]
    out = ops.token_logprobs(*leaves, targets, filters, logprobs_reference.pack_support(kept), True)
    found = torch.autograd.grad(out.logprob_C.sum(), leaves)
    doubles = [x.detach().double().requires_grad_() for x in leaves]
    z = (doubles[0] @ doubles[1].t() / 0.01).masked_fill(~kept, -torch.inf)
    exact = z.log_softmax(1).gather(1, targets.unsqueeze(1)).sum()
    for a, b in zip(found, torch.autograd.grad(exact, doubles), strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-3, atol=1e-3)
