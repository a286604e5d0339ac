"""The backward kernel of the log-probabilities under Triton's interpreter, against the torch formula and autograd.

As in `test_kernels_interpret`, one test runs `Interpreted` in a process of its own, in float32.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lockstep.ops import logprobs, logprobs_reference

if os.environ.get("TRITON_INTERPRET") == "1":
    from lockstep.ops.kernels import logprobs_backward as kernels

ROWS = 6


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_kernels_under_the_interpreter():
    command = [sys.executable, "-m", "pytest", "-q", "-o", "addopts=", "-o", "python_classes=Interpreted"]
    command += ["-p", "no:cacheprovider", "-W", "ignore::RuntimeWarning", f"{Path(__file__)}::Interpreted"]
    result = subprocess.run(
        command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, result.stdout + result.stderr


class Interpreted:
    @pytest.fixture(autouse=True)
    def nan_for_unwritten(self):
        torch.manual_seed(0)
        torch.use_deterministic_algorithms(True)  # fills new memory
        yield
        torch.use_deterministic_algorithms(False)

    def case(self, vocabulary: int, kind: str):
        """Arguments of `_grad_logits`: some rows greedy, some without a gradient."""
        logits = 4 * torch.randn(ROWS, vocabulary)
        targets = torch.randint(vocabulary, (ROWS,))
        targets[0], targets[1] = 0, vocabulary - 1
        temperature = torch.tensor([1.0, 0.7, 0.0, 2.0, 1.0, 0.3])
        truncated = kind == "truncated"
        top_k = torch.tensor([5, 3, 0, 0, 40, 1], dtype=torch.int32) * truncated
        top_p = torch.tensor([1.0, 0.9, 1.0, 0.5, 1.0, 1.0]) if truncated else torch.ones(ROWS)
        kept = (torch.rand_like(logits) < 0.5).scatter_(1, targets.unsqueeze(1), True)
        support = logprobs_reference.pack_support(kept) if kind == "support" else None
        stats = logprobs_reference.statistics(
            logits, temperature, top_k, top_p, torch.zeros(ROWS), support, truncated, False
        )
        grads = torch.randn(2, ROWS)
        grads[0, 3] = grads[1, 4] = 0
        return logits, targets, temperature, logprobs.RowStatistics(*stats), support, *grads, truncated

    @pytest.mark.parametrize("vocabulary", [5, 100, 4096, 5003])
    @pytest.mark.parametrize("kind", ["plain", "truncated", "support"])
    def test_formula(self, vocabulary, kind):
        logits, targets, temperature, stats, support, *rest = self.case(vocabulary, kind)
        result = kernels.grad_logits(logits, targets, temperature, *stats[:3], support, *rest, torch.float32)
        expected = logprobs._grad_logits(logits, targets, temperature, stats, support, *rest)
        assert result.dtype == torch.float32
        torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-6)

    @pytest.mark.parametrize("kind", ["plain", "truncated", "support"])
    def test_autograd(self, kind):
        """Of the definition, in float64: log-softmax over the support of the tempered logits, and of the logits."""
        logits, targets, temperature, stats, support, grad_sampled, grad_model, truncated = self.case(100, kind)
        result = kernels.grad_logits(
            logits, targets, temperature, *stats[:3], support, grad_sampled, grad_model, truncated, torch.float32
        )
        divisor = logprobs_reference.divisor(temperature).unsqueeze(1)
        kept = logits / divisor >= stats.threshold_C.unsqueeze(1)
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
        logits, targets, temperature, stats, support, *grads, truncated = self.case(100, "truncated")
        logits[3] = torch.nan
        result = kernels.grad_logits(
            logits, targets, temperature, *stats[:3], support, *grads, truncated, torch.float32
        )
        assert result.isnan().any(1).tolist() == [False, False, False, True, False, False]


@pytest.mark.parametrize("with_support", [True, False])
def test_operator_under_fake_tensors(with_support):
    """As a trace for a GPU calls it: nothing is launched, gradients have the shapes and dtypes of their inputs."""
    with torch._subclasses.FakeTensorMode():
        hidden, weight = (torch.empty(n, 16, dtype=torch.bfloat16, device="cuda") for n in (9, 50))
        targets, number = torch.empty(9, dtype=torch.int64, device="cuda"), torch.empty(9, device="cuda")
        support = torch.empty(9, 7, dtype=torch.uint8, device="cuda") if with_support else None
        grads = logprobs._token_logprobs_backward(
            number, number, hidden, weight, targets, number, support, number, number, number, True
        )
    assert [(g.shape, g.dtype, g.device) for g in grads] == [(x.shape, x.dtype, x.device) for x in (hidden, weight)]
