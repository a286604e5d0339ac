"""The policy step: on-policy at first, equal to autograd on a dense model, the same bits again."""

import dataclasses
import math

import pytest
import torch
from updates import FILTERED, LR, MAX_TOKENS, WARM, NoHostReads, bits, gradients, make_trainer, one_batch, same

from lockstep.algorithms import ALGORITHMS
from lockstep.models import save_model
from lockstep.models.hf.weight_map import weight_map
from lockstep.trainer import pack
from lockstep.types import SamplingParams


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sampling", [SamplingParams(), WARM, FILTERED], ids=["plain", "warm", "filtered"])
def test_first_update_is_on_policy_and_is_applied(make_model, make_groups, record, dtype, sampling):
    model = make_model(dtype)
    groups = record(model, make_groups(sampling))
    trainer = make_trainer(model)
    before = bits(trainer)
    batch = one_batch(groups)
    trainer.forward_backward(batch)
    result = trainer.optim_step(LR)
    n = sum(len(s.token_ids) for g in groups for s in g.rollouts)
    assert (result.tokens, result.tokens_checked, result.tokens_different) == (n, n, 0)
    assert result.applied and result.finite and trainer.weights_version == 1
    assert (result.clip_ratio, result.logprob_diff_max, result.mismatches) == (0.0, 0.0, [])
    assert result.loss == -(batch.weight_C * batch.advantage_C).sum().item()  # every ratio is exactly 1
    assert result.grad_norm > 0 and result.lr == LR and result.kl is None
    assert not same(before, bits(trainer))


def test_entropy_is_of_the_untruncated_model(make_model, make_groups, hidden_rows):
    model = make_model()
    batch = one_batch(make_groups(FILTERED), check_parity=False)
    trainer = make_trainer(model)
    log_p = torch.log_softmax(hidden_rows(model, batch)[batch.valid_C].detach() @ model.lm_head.T, dim=1)
    trainer.forward_backward(batch)
    assert trainer.optim_step(0.0).entropy == pytest.approx(-(log_p.exp() * log_p).sum(1).mean().item(), rel=1e-5)


def test_packing_does_not_change_the_gradient(make_model, make_groups, record):
    model = make_model()
    groups = record(model, make_groups(WARM))
    trainer = make_trainer(model)
    whole = gradients(trainer, [one_batch(groups)])
    for options in ({"mode": "per_sample"}, {"share_prefix": False}, {"max_tokens": 160}):
        batches = pack(groups, **{"max_tokens": MAX_TOKENS, "check_parity": True, **options})
        torch.testing.assert_close(gradients(trainer, batches), whole, rtol=1e-4, atol=1e-5 * whole.abs().max().item())
    assert len(batches) > 1


def test_micro_batches_add_up_to_one_update(make_model, make_groups, record):
    results, weights = [], []
    for max_tokens in (MAX_TOKENS, 160):
        model = make_model()
        trainer = make_trainer(model)
        for batch in pack(record(model, make_groups()), max_tokens=max_tokens, check_parity=True):
            trainer.forward_backward(batch)
        results.append(trainer.optim_step(LR))
        weights.append(trainer.flat.data)
    whole, parts = results
    assert (parts.tokens, parts.tokens_checked) == (whole.tokens, whole.tokens_checked)
    assert parts.loss == pytest.approx(whole.loss, rel=1e-5) and parts.entropy == pytest.approx(whole.entropy)
    assert parts.grad_norm == pytest.approx(whole.grad_norm, rel=1e-4) and trainer.weights_version == 1


def dense_logits(model, groups):
    """[tokens, V] logits of every completion token from a padded batch through `transformers`' model."""
    pairs = [(g.prompt_ids, s.token_ids) for g in groups for s in g.rollouts]
    longest = max(len(p) + len(c) for p, c in pairs)
    ids = torch.zeros(len(pairs), longest, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, (prompt, completion) in enumerate(pairs):
        n = len(prompt) + len(completion)
        ids[row, :n], mask[row, :n] = torch.tensor(prompt + completion), 1
    logits = model(ids, attention_mask=mask).logits
    return torch.cat([logits[row, len(p) - 1 : len(p) + len(c) - 1] for row, (p, c) in enumerate(pairs)])


def dense_loss(logits, groups, loss_type, old, advantage, reference, beta, corrected):
    """The losses as their papers write them, over a list of sequences."""
    sequences = [s for g in groups for s in g.rollouts]
    targets = torch.tensor([t for s in sequences for t in s.token_ids])
    temperature = groups[0].sampling.temperature
    logprob = torch.log_softmax(logits / temperature, dim=1).gather(1, targets[:, None])[:, 0]
    model = torch.log_softmax(logits, dim=1).gather(1, targets[:, None])[:, 0]
    ref = torch.log_softmax(reference, dim=1).gather(1, targets[:, None])[:, 0]
    ratio, high = torch.exp(logprob - old), 1.28 if loss_type == "dapo" else 1.2
    token = -torch.minimum(ratio * advantage, ratio.clamp(0.8, high) * advantage)
    kl = (torch.exp(ref - model) - (ref - model) - 1) * (torch.exp(model - old) if corrected else 1)
    token = -model if loss_type == "sft" else token + beta * kl
    per_sequence = torch.split(token, [len(s.token_ids) for s in sequences])
    if loss_type == "grpo":
        return torch.stack([t.mean() for t in per_sequence]).mean()
    if loss_type == "dr_grpo":
        return torch.stack([t.sum() / 100 for t in per_sequence]).mean()
    return token.mean()


@pytest.mark.parametrize("loss_type", ["grpo", "dr_grpo", "dapo", "sft"])
@pytest.mark.parametrize("tie", [True, False])
def test_the_step_equals_autograd_on_a_dense_padded_model(make_model, make_groups, tmp_path, loss_type, tie):
    from transformers import AutoModelForCausalLM

    model, reference, groups = make_model(tie=tie), make_model(seed=1, tie=tie), make_groups(WARM)
    save_model(model, tmp_path / "model")
    save_model(reference, tmp_path / "reference")
    dense = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    dense_reference = AutoModelForCausalLM.from_pretrained(tmp_path / "reference", dtype=torch.float32)

    sequences = [s for g in groups for s in g.rollouts]
    lengths = [len(s.token_ids) for s in sequences]
    logits = dense_logits(dense, groups)
    with torch.no_grad():  # old log-probs at some distance, so that both sides of the clip are reached
        targets = torch.tensor([t for s in sequences for t in s.token_ids])
        old = torch.log_softmax(logits / WARM.temperature, dim=1).gather(1, targets[:, None])[:, 0]
        old = old + 0.3 * torch.randn(old.shape, generator=torch.Generator().manual_seed(0))
        reference_logits = dense_logits(dense_reference, groups)
    advantage = torch.cat([torch.full((n,), s.advantage) for s, n in zip(sequences, lengths, strict=True)])
    loss = dense_loss(logits, groups, loss_type, old, advantage, reference_logits, beta=0.05, corrected=tie)
    loss.backward()

    weights = ALGORITHMS[loss_type]().weights(lengths, len(sequences), 100)
    for s, weight, values in zip(sequences, weights, torch.split(old, lengths), strict=True):
        s.loss_weight, s.turns[0].logprobs = weight, values.tolist()
    kl = {"beta": 0.05, "use_bias_correction_kl": tie}
    trainer = make_trainer(model, reference=reference, loss_type=loss_type, **kl)
    for batch in pack(groups, max_tokens=300, check_parity=False):
        trainer.reference_logprobs(batch)
        trainer.forward_backward(batch)
    expected = {name: p.grad for name, p in dense.named_parameters()}
    offset_of = {id(p): p.storage_offset() for p in model.parameters()}
    parameters = dict(model.named_parameters())
    for piece in weight_map(model.config):
        parameter = parameters[piece.parameter]
        start = offset_of[id(parameter)]
        grad = trainer.flat.grad[start : start + parameter.numel()].view(parameter.shape)
        want = expected[piece.name]
        have = grad[piece.start : piece.start + piece.rows]
        torch.testing.assert_close(have, want, rtol=1e-4, atol=1e-4 * want.abs().max().item())
        assert (have - want).norm() <= 1e-5 * want.norm()
    result = trainer.optim_step(LR)
    assert result.loss == pytest.approx(loss.item(), rel=1e-5, abs=1e-6) and result.applied
    norm = math.sqrt(sum(g.square().sum().item() for g in expected.values()))
    assert result.grad_norm == pytest.approx(norm, rel=1e-5)
    if loss_type != "sft":
        assert 0.1 < result.clip_ratio < 0.9
        assert result.kl > 0


def test_kl_of_the_reference_itself_is_zero(make_model, make_groups, record):
    model, reference = make_model(), make_model()
    batch = one_batch(record(model, make_groups()))
    trainer = make_trainer(model, reference=reference, beta=0.1)
    trainer.reference_logprobs(batch)
    trainer.forward_backward(batch)
    assert trainer.optim_step(LR).kl == 0.0
    batch.check_parity = False
    trainer.forward_backward(batch)
    assert trainer.optim_step(LR).kl > 0.0


def test_beta_needs_a_reference(make_model):
    with pytest.raises(ValueError, match="beta"):
        make_trainer(make_model(), beta=0.1)


def sample_in_place(model, groups, hidden_rows, length):
    """Replace the first `length` tokens of every completion by samples of the filtered distribution."""
    generator = torch.Generator().manual_seed(0)
    for group in groups:
        for sequence in group.rollouts:
            sequence.turns[0].token_ids = sequence.token_ids[:length]
    for i in range(length):
        batch = one_batch(groups, check_parity=False)
        with torch.no_grad():
            p = torch.softmax(dense_filter(hidden_rows(model, batch) @ model.lm_head.T, groups[0].sampling), dim=1)
        drawn = torch.multinomial(p, 1, generator=generator).flatten().tolist()
        row = 0
        for sequence in batch.sequences:
            n = len(sequence.token_ids)
            if i < n:
                sequence.turns[0].token_ids[i] = drawn[row + i]
            row += n


def dense_filter(logits, p):
    """Logits over temperature, -inf outside the support: top-k, then top-p over what is left, then min-p."""
    z = logits / p.temperature
    z = z.masked_fill(z < z.topk(p.top_k, dim=1).values[:, -1:], -math.inf)
    probability, order = torch.softmax(z, dim=1).sort(dim=1, descending=True)
    beyond = probability.cumsum(1) - probability >= p.top_p
    z = z.masked_fill(torch.zeros_like(beyond).scatter(1, order, beyond), -math.inf)
    return z.masked_fill(z < z.max(1, keepdim=True).values + math.log(p.min_p), -math.inf)


def test_second_update_keeps_the_support_that_was_sampled(make_model, make_groups, hidden_rows, record):
    """Against a dense computation whose support is that of the weights before the first update."""
    model = make_model()
    groups = make_groups(FILTERED)
    sample_in_place(model, groups, hidden_rows, length=8)
    batch = one_batch(record(model, groups))
    valid = batch.valid_C
    with torch.no_grad():
        support = dense_filter(hidden_rows(model, batch) @ model.lm_head.T, FILTERED).isfinite()
    trainer = make_trainer(model)
    trainer.forward_backward(batch, keep_support=True)
    first = trainer.optim_step(LR)
    assert first.applied and first.loss == -(batch.weight_C * batch.advantage_C).sum().item()
    assert batch.support_C.shape == (len(valid), -(-model.config.vocab_size // 8))

    batch.check_parity = False
    logits = hidden_rows(model, batch) @ model.lm_head.T
    with torch.no_grad():
        assert not torch.equal(dense_filter(logits, FILTERED).isfinite()[valid], support[valid])  # it would move
    z = (logits / FILTERED.temperature).masked_fill(~support, -math.inf)
    logprob = torch.log_softmax(z, dim=1).gather(1, batch.targets_C[:, None])[:, 0]
    ratio = torch.exp(logprob - batch.old_logprob_C)[valid]
    advantage, weight = batch.advantage_C[valid], batch.weight_C[valid]
    loss = -(weight * torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)).sum()
    dense_grads = torch.autograd.grad(loss, trainer.flat.parameters)
    kept = batch.support_C.clone()
    trainer.forward_backward(batch, keep_support=True)
    assert torch.equal(batch.support_C, kept)
    want = torch.zeros_like(trainer.flat.grad)
    for parameter, grad in zip(trainer.flat.parameters, dense_grads, strict=True):
        want[parameter.storage_offset() :][: parameter.numel()] = grad.flatten()
    torch.testing.assert_close(trainer.flat.grad, want, rtol=1e-4, atol=1e-4 * want.abs().max().item())
    second = trainer.optim_step(LR)
    assert second.loss == pytest.approx(loss.item(), rel=1e-4) and second.tokens_checked == 0
    assert second.applied and second.clip_ratio > 0


def test_reset_forgets_the_moments_but_not_the_weights(make_model, make_groups, record):
    model, fresh_model = make_model(), make_model()
    trainer = make_trainer(model)
    trainer.forward_backward(one_batch(record(model, make_groups())))
    trainer.optim_step(LR)
    trainer.optimizer.reset()
    fresh_model.load_state_dict(model.state_dict())
    fresh = make_trainer(fresh_model)
    assert same(bits(trainer), bits(fresh))


def run_three_steps(model, make_groups, record, trainer=None, start=0):
    trainer = trainer or make_trainer(model)
    results = []
    for step in range(start, 3):
        for batch in pack(record(model, make_groups(FILTERED, seed=step)), max_tokens=200, check_parity=True):
            trainer.forward_backward(batch)
        results.append(trainer.optim_step(LR))
    return trainer, results


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_two_runs_and_a_resumed_one_give_the_same_bits(make_model, make_groups, record, dtype):
    trainer, results = run_three_steps(make_model(dtype), make_groups, record)
    again, repeated = run_three_steps(make_model(dtype), make_groups, record)
    assert [dataclasses.asdict(r) for r in results] == [dataclasses.asdict(r) for r in repeated]
    assert all(r.applied for r in results) and same(bits(trainer), bits(again))

    model = make_model(dtype)
    stopped = make_trainer(model)
    for batch in pack(record(model, make_groups(FILTERED, seed=0)), max_tokens=200, check_parity=True):
        stopped.forward_backward(batch)
    stopped.optim_step(LR)
    tensors, numbers = stopped.state()
    model = make_model(dtype, seed=5)
    resumed = make_trainer(model)
    resumed.load_state({k: v.clone() for k, v in tensors.items()}, numbers)
    _, rest = run_three_steps(model, make_groups, record, resumed, start=1)
    assert rest == results[1:] and same(bits(resumed), bits(trainer)) and resumed.weights_version == 3


def test_supervised_steps_lower_the_loss(make_model, make_groups):
    model = make_model()
    trainer = make_trainer(model)
    groups = make_groups()
    lengths = [len(s.token_ids) for g in groups for s in g.rollouts]
    weights = iter(ALGORITHMS["sft"]().weights(lengths, len(lengths), 0))
    for group in groups:
        for sequence in group.rollouts:
            sequence.loss_weight = next(weights)
    batch = one_batch(groups, check_parity=False)
    losses = []
    for _ in range(8):
        trainer.forward_backward(batch, loss_type="sft")
        losses.append(trainer.optim_step(LR).loss)
    assert losses[-1] < 0.5 * losses[0]


def test_updates_launched_before_their_results_are_taken_are_the_same(make_model, make_groups, record):
    def updates(launch_all):
        model = make_model()
        groups = record(model, make_groups())
        trainer = make_trainer(model, enforce_parity=False)
        groups[0].rollouts[0].logprobs[0] += 1.0  # the first update's alone
        pending, results = [], []
        for i in range(3):
            groups[1].rollouts[0].advantage = math.nan if i == 1 else 0.5  # the second is not applied
            trainer.forward_backward(one_batch(groups, check_parity=i == 0))
            pending.append(trainer.launch_optim_step(LR))
            results += [] if launch_all else [pending[-1].get()]
        assert trainer.weights_version == (0 if launch_all else 2)
        results = results or [update.get() for update in pending]
        assert all(update.get() is result for update, result in zip(pending, results, strict=True))
        assert trainer.weights_version == 2 and [r.applied for r in results] == [True, False, True]
        assert [len(r.mismatches) for r in results] == [1, 0, 0]
        return [repr(result) for result in results], bits(trainer)

    (one_by_one, expected), (later, found) = updates(False), updates(True)
    assert one_by_one == later and same(expected, found)


def test_launching_an_update_reads_nothing_from_the_device(make_model, make_groups, record):
    model = make_model()
    trainer = make_trainer(model)
    trainer.forward_backward(one_batch(record(model, make_groups())))
    with NoHostReads():
        pending = trainer.launch_optim_step(LR)
    assert pending.get().applied
