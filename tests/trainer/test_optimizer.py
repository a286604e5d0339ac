import math
from fractions import Fraction

import pytest
import torch
from small import stepped

from lockstep import ops
from lockstep.config import OptimizerConfig
from lockstep.trainer import AdamW, FlatParameters, learning_rate

LR = 3e-3


def make(model, **config):
    flat = FlatParameters(model)
    return flat, AdamW(flat, OptimizerConfig(**config))


def random_grads(flat, seed, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    return tuple(scale * torch.randn(p.shape, generator=generator) for p in flat.parameters)


def bits(optimizer):
    return {k: v.clone() for k, v in {**optimizer.state(), "weights": optimizer.flat.data}.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tie", [True, False])
def test_parameters_become_aligned_views_and_keep_their_values(make_model, dtype, tie):
    model, plain = make_model(dtype, tie=tie), make_model(dtype, tie=tie)
    flat = FlatParameters(model)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))
    assert (model.lm_head is model.embed) == tie and len(flat.parameters) == len(list(plain.parameters()))
    offsets = [p.storage_offset() for p in flat.parameters]
    assert offsets == sorted(offsets) and all(o % 64 == 0 for o in offsets)
    assert [p.dim() for p in flat.parameters] == sorted((p.dim() for p in plain.parameters()), reverse=True)
    assert all((p.dim() < 2) == (o >= flat.num_matrix_elements) for p, o in zip(flat.parameters, offsets, strict=True))
    flat.data.zero_()
    assert all(not p.any() for p in model.parameters())
    assert flat.data.dtype == dtype and flat.grad.dtype == torch.float32


@pytest.mark.parametrize("max_grad_norm", [1.0, 0.0])
def test_equals_torch(make_model, max_grad_norm):
    model, plain = make_model(), make_model()
    flat, ours = make(model, beta1=0.9, beta2=0.95, weight_decay=0.1, max_grad_norm=max_grad_norm)
    groups = [
        {"params": [p for p in plain.parameters() if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in plain.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    theirs = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95), eps=1e-8, foreach=False)
    parameters = [p for group in groups for p in group["params"]]
    for step in range(5):
        grads = random_grads(flat, step, scale=10.0 ** (step - 3))  # the norm is on both sides of 1
        flat.accumulate(flat.grads, grads)
        for parameter, grad in zip(parameters, grads, strict=True):
            parameter.grad = grad.clone()
        expected = torch.nn.utils.clip_grad_norm_(parameters, max_grad_norm or math.inf)
        norm, applied = stepped(ours, LR)
        theirs.step()
        assert applied and torch.allclose(norm, expected, rtol=1e-6) and not flat.grad.any()
        for a, b in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6 * LR)
    assert ours.steps.tolist() == [5, 5]


def test_the_scale_of_a_clipped_gradient_is_torchs(make_model):
    """The bound over the norm plus 1e-6, which is a tenth of this norm."""
    flat, ours = make(make_model(), max_grad_norm=1e-6)
    flat.grad[0] = 1e-5
    stepped(ours, LR)
    assert ours.exp_avg[0].item() == pytest.approx(0.1 * 1e-6 / 1.1, rel=1e-6)


def test_fresh_moments_are_corrected_for_their_bias(make_model):
    (flat, ours), (other_flat, other) = make(make_model()), make(make_model())
    flat.accumulate(flat.grads, random_grads(flat, 0))
    stepped(ours, LR)
    ours.reset()
    other_flat.data.copy_(flat.data)
    for f, optimizer in ((flat, ours), (other_flat, other)):
        f.accumulate(f.grads, random_grads(flat, 1))
        stepped(optimizer, LR)
    assert torch.equal(flat.data, other_flat.data) and ours.steps.tolist() == [1, 1]


def test_gradients_accumulate_in_float32(make_model):
    flat, _ = make(make_model(torch.bfloat16))
    ones = tuple(torch.ones_like(p) for p in flat.parameters)
    for _ in range(257):  # bfloat16 would stop at 256
        flat.accumulate(flat.grads, ones)
    assert flat.grad.max() == 257 and int((flat.grad > 0).sum()) == sum(p.numel() for p in flat.parameters)


def test_bfloat16_weights_are_the_rounded_masters(make_model):
    model = make_model(torch.bfloat16)
    flat, optimizer = make(model)
    start = flat.data.clone()
    for step in range(20):
        flat.accumulate(flat.grads, random_grads(flat, step))
        stepped(optimizer, 1e-6)
    assert torch.equal(flat.data, optimizer.master.bfloat16())
    drift = (optimizer.master - start.float()).abs()
    assert drift.max() > 5e-6  # small updates add up in the masters where a bfloat16 weight would not move


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ok, poison", [(False, 1.0), (True, math.nan), (True, math.inf), (False, math.nan)])
def test_a_refused_update_changes_no_bit(make_model, dtype, ok, poison):
    flat, optimizer = make(make_model(dtype), weight_decay=0.1)
    flat.accumulate(flat.grads, random_grads(flat, 0))
    stepped(optimizer, LR)
    optimizer.exp_avg[0] = -0.0
    before = bits(optimizer)
    flat.accumulate(flat.grads, random_grads(flat, 1))
    flat.grad[5] = poison
    _, applied = stepped(optimizer, LR, ok)
    assert not applied and not flat.grad.any()
    for name, value in bits(optimizer).items():
        view = torch.int32 if value.dtype == torch.float32 else torch.int16
        assert torch.equal(value.view(view), before[name].view(view)), name
    flat.accumulate(flat.grads, random_grads(flat, 2))
    assert stepped(optimizer, LR)[1] and not torch.equal(optimizer.master, before["master"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_resumes_bit_for_bit(make_model, dtype):
    flat, optimizer = make(make_model(dtype), weight_decay=0.1)
    other_flat, other = make(make_model(dtype, seed=1), weight_decay=0.1)
    flat.accumulate(flat.grads, random_grads(flat, 0))
    stepped(optimizer, LR)
    other.load_state({k: v.clone() for k, v in optimizer.state().items()})
    assert torch.equal(other_flat.data, flat.data)
    for f, o in ((flat, optimizer), (other_flat, other)):
        f.accumulate(f.grads, random_grads(flat, 1))
        stepped(o, LR)
    assert all(torch.equal(a, b) for a, b in zip(bits(optimizer).values(), bits(other).values(), strict=True))


def test_state_of_another_model_is_refused(make_model):
    _, optimizer = make(make_model())
    _, untied = make(make_model(tie=False))
    with pytest.raises(ValueError, match="master"):
        optimizer.load_state(untied.state())


def test_the_norm_keeps_its_digits_over_many_elements(make_model):
    flat, optimizer = make(make_model())
    flat.grad.fill_(1 / 3)
    assert stepped(optimizer, 0.0)[0] == pytest.approx(math.sqrt(flat.grad.numel()) / 3, rel=3e-7)


def test_the_norm_is_the_root_of_the_exact_sum_of_the_blocks(make_model):
    flat, optimizer = make(make_model(), max_grad_norm=0.0)
    flat.accumulate(flat.grads, random_grads(flat, 0, scale=1e-3))
    exact = sum(map(Fraction, ops.square_sums(flat.grad).tolist()))
    assert stepped(optimizer, 0.0)[0] == torch.tensor(math.sqrt(exact), dtype=torch.float32)


@pytest.mark.parametrize("scale, clips", [(1e-3, False), (10.0, True)])
def test_where_nothing_is_clipped_the_norms_last_bits_are_in_no_weight(make_model, monkeypatch, scale, clips):
    (flat, ours), (_, other) = make(make_model()), make(make_model())
    norms = []
    for optimizer in (ours, other):
        optimizer.flat.accumulate(optimizer.flat.grads, random_grads(flat, 0, scale))
        norms.append(stepped(optimizer, LR)[0])
        monkeypatch.setattr(ops, "root_of_sum", lambda words: torch.nextafter(norms[0] * 0.999999, norms[0]))
    assert norms[0] != norms[1] and clips == (norms[0] > 1)
    before, after = bits(ours), bits(other)
    assert clips != all(torch.equal(before[name], after[name]) for name in before)


def test_sums_that_float32_cannot_hold_have_a_norm(make_model):
    flat, optimizer = make(make_model())
    flat.grad[[0, 4096]] = 1.5e19
    norm, applied = stepped(optimizer, LR)
    assert applied and norm.item() == pytest.approx(math.sqrt(2) * 1.5e19, rel=1e-6)
    flat.grad[0] = 1e20  # its own block's sum
    assert not stepped(optimizer, LR)[1]


def test_learning_rate():
    def rates(scheduler, warmup):
        config = OptimizerConfig(learning_rate=8.0, warmup_steps=warmup, lr_scheduler=scheduler)
        return [learning_rate(config, step, 6) for step in range(7)]

    assert rates("constant", 2) == [4.0, 8.0, 8.0, 8.0, 8.0, 8.0, 8.0]
    assert rates("linear", 2) == [4.0, 8.0, 8.0, 6.0, 4.0, 2.0, 0.0]
    assert rates("linear", 0) == pytest.approx([8.0, 40 / 6, 32 / 6, 4.0, 16 / 6, 8 / 6, 0.0])
    assert rates("cosine", 2) == pytest.approx([4.0, 8.0, 8.0, 4 + math.sqrt(8), 4.0, 4 - math.sqrt(8), 0.0])
    assert learning_rate(OptimizerConfig(learning_rate=1.0, lr_scheduler="cosine"), 9, 6) == 0.0
