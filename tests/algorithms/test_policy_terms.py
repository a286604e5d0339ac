import math

import pytest
import torch

from lockstep.algorithms import make_algorithm, supervised_algorithm
from lockstep.algorithms.policy_terms import TokenValues, corrected_kl, kl_k3
from lockstep.config import LossConfig


def evaluate(loss_type, log_ratio, advantage, **config):
    """Loss, clip indicator and d loss / d logprob for one token a value."""
    old = torch.full((len(log_ratio),), -2.0)
    logprob = (old + torch.tensor(log_ratio)).requires_grad_()
    model = torch.linspace(-3, -1, len(log_ratio), requires_grad=True)
    values = TokenValues(logprob, model, old, torch.tensor(advantage))
    settings = LossConfig(**config) if loss_type == "sft" else LossConfig(loss_type, **config)
    algorithm = supervised_algorithm(settings) if loss_type == "sft" else make_algorithm(settings)
    loss, clipped = algorithm.loss(values)
    target = model if loss_type == "sft" else logprob
    (grad,) = torch.autograd.grad(loss.sum(), target)
    return loss.detach(), clipped.tolist(), grad


def test_grpo_by_hand():
    ratios, advantage = [1.0, 1.5, 0.5, 1.5, 0.5, 1.1], [2.0, 2.0, 2.0, -2.0, -2.0, 0.0]
    for loss_type in ("grpo", "dr_grpo"):
        loss, clipped, grad = evaluate(loss_type, [math.log(r) for r in ratios], advantage)
        torch.testing.assert_close(loss, torch.tensor([-2.0, -2.4, -1.0, 3.0, 1.6, 0.0]))
        assert clipped == [False, True, False, False, True, False]
        torch.testing.assert_close(grad, torch.tensor([-2.0, 0.0, -1.0, 3.0, 0.0, 0.0]))


def test_epsilon_high_and_the_default_of_dapo():
    log_ratio, advantage = [math.log(1.25), math.log(1.29), math.log(0.75)], [1.0, 1.0, -1.0]
    assert evaluate("grpo", log_ratio, advantage)[1] == [True, True, True]
    assert evaluate("grpo", log_ratio, advantage, epsilon_high=0.28)[1] == [False, True, True]
    loss, clipped, _ = evaluate("dapo", log_ratio, advantage)
    assert clipped == [False, True, True]
    torch.testing.assert_close(loss, torch.tensor([-1.25, -1.28, 0.8]))
    assert evaluate("dapo", log_ratio, advantage, epsilon_high=0.3)[1] == [False, False, True]
    assert evaluate("dapo", log_ratio, advantage, epsilon=0.0, epsilon_high=0.0)[0].tolist() == [-1.0, -1.0, 1.0]


@pytest.mark.parametrize("epsilon, epsilon_high", [(0.2, None), (0.0, None), (0.1, 0.4), (1.0, None), (1.5, None)])
def test_the_clip_equals_the_two_sided_minimum_of_ppo(epsilon, epsilon_high):
    generator = torch.Generator().manual_seed(0)
    log_ratio = torch.randn(200, generator=generator).tolist()
    advantage = torch.randn(200, generator=generator)
    loss, _, grad = evaluate("grpo", log_ratio, advantage.tolist(), epsilon=epsilon, epsilon_high=epsilon_high)
    logprob = (torch.full((200,), -2.0) + torch.tensor(log_ratio)).requires_grad_()
    ratio = torch.exp(logprob + 2.0)
    high = epsilon if epsilon_high is None else epsilon_high
    plain = -torch.minimum(ratio * advantage, ratio.clamp(1 - epsilon, 1 + high) * advantage)
    (plain_grad,) = torch.autograd.grad(plain.sum(), logprob)
    torch.testing.assert_close(loss, plain.detach())
    torch.testing.assert_close(grad, plain_grad)


def test_a_huge_ratio_is_clipped_or_infinite_but_never_hidden():
    loss, clipped, grad = evaluate("grpo", [200.0, 200.0], [1.0, -1.0])
    torch.testing.assert_close(loss[0], torch.tensor(-1.2))
    assert clipped == [True, False] and grad[0] == 0
    assert loss[1] == math.inf and not grad[1].isfinite()
    assert evaluate("grpo", [0.0], [math.nan])[0].isnan().all()
    loss, clipped, grad = evaluate("grpo", [200.0, -200.0], [0.0, 0.0])
    assert not loss.any() and not grad.any() and clipped == [False, False], "what has no advantage has no part in it"


def test_first_update_is_exactly_the_policy_gradient():
    loss, clipped, grad = evaluate("grpo", [0.0, 0.0], [0.3, -0.7], epsilon=0.0)
    assert torch.equal(loss, torch.tensor([-0.3, 0.7])) and torch.equal(grad, torch.tensor([-0.3, 0.7]))
    assert clipped == [False, False]


def test_sft_is_the_models_own_cross_entropy():
    loss, clipped, grad = evaluate("sft", [0.0, 1.0], [5.0, 5.0])
    assert loss.tolist() == [3.0, 1.0] and grad.tolist() == [-1.0, -1.0] and clipped == [False, False]


def test_kl_k3():
    model = torch.tensor([-1.0, -1.0, -2.0, -1.0], requires_grad=True)
    kl = kl_k3(model, torch.tensor([-1.0, -2.0, -1.0, -1.0 + 2**-12]))
    torch.testing.assert_close(kl[:3], torch.tensor([0.0, math.exp(-1), math.e - 2]))
    assert kl[3].item() == pytest.approx(2**-25, rel=1e-3)  # exp(d) - d - 1 would have no digit left
    (grad,) = torch.autograd.grad(kl.sum(), model)  # d/d model = 1 - exp(ref - model)
    torch.testing.assert_close(grad[:3], torch.tensor([0.0, 1 - math.exp(-1), 1 - math.e]))


def test_kl_is_unbiased_under_the_models_own_samples():
    p, q = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.2, 0.6])
    exact = (p * (p / q).log()).sum()
    torch.testing.assert_close((p * kl_k3(p.log(), q.log())).sum(), exact)


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.5])
@pytest.mark.parametrize("moved", [0.0, 0.3])
def test_corrected_kl_and_its_gradient_are_unbiased_at_every_temperature(temperature, moved):
    """The sum over all tokens of one position, by their probability when sampled; `moved`: updates were made since."""
    generator = torch.Generator().manual_seed(3)
    sampled, change, reference = torch.randn(3, 11, dtype=torch.float64, generator=generator)
    logits = (sampled + moved * change).requires_grad_()
    model, ref = torch.log_softmax(logits, 0), torch.log_softmax(reference, 0)
    drawn = torch.log_softmax(sampled / temperature, 0)
    exact = (model.exp() * (model - ref)).sum()
    (gradient,) = torch.autograd.grad(exact, logits, retain_graph=True)
    values = TokenValues(drawn, model, drawn, torch.zeros(11))
    estimate = (drawn.exp() * corrected_kl(values, ref)).sum()
    torch.testing.assert_close(estimate, exact)
    torch.testing.assert_close(torch.autograd.grad(estimate, logits, retain_graph=True)[0], gradient)
    plain = (drawn.exp() * kl_k3(model, ref)).sum()
    assert (abs(plain - exact) > 0.02 * exact) == (temperature != 1 or moved > 0)
    assert (torch.autograd.grad(plain, logits)[0] - gradient).abs().max() > 0.02
